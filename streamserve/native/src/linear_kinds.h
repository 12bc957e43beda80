// The two families of kinds, each in a file of its own. `vecs`: vectors of kWidth outputs.
#pragma once

#include "linear.h"

namespace ss {

void multiply_dense(const Linear& linear, const uint8_t* inputs, int64_t num_rows, Range vecs, const Outputs& outputs);
void multiply_grouped(const Linear& linear, const uint8_t* inputs, int64_t num_rows, Range vecs, const Outputs& outputs);

}  // namespace ss
