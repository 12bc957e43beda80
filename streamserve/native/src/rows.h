// Rows of a packed weight as numbers: an embedding that shares its weight with a head is read out of the head's panels.
#pragma once

#include "linear.h"

namespace ss {

// Write the numbers that row `row` of the weight (num_outputs, num_inputs) stands for to `out` (num_inputs,).
void unpack_row(const Linear& linear, int64_t row, float* out);

}  // namespace ss
