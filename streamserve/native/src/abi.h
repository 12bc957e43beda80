// The library's C ABI: every function that Python calls (library.py lists them with their types).
//
// Addresses point to contiguous memory that the caller keeps alive; sizes are int64; dtypes are DType of types.h. A
// function never throws, allocates only scratch memory, and uses `num_threads` threads of the process's OpenMP pool.
#pragma once

#include <cstdint>

#define SS_API extern "C" __attribute__((visibility("default")))

constexpr int64_t kAbiVersion = 1;  // library.py's ABI_VERSION; a changed argument list raises both

SS_API int64_t ss_abi_version();

// 0 if the library computes here: run once, in a process of its own, after it was compiled.
SS_API int ss_self_check();

// How many threads a region of `num_threads` gets.
SS_API int64_t ss_team_size(int64_t num_threads);
