// The memory one step walks through: columns of equal length, one value of each per element.
#pragma once

#include <cstdint>
#include <functional>

#include "dtype.h"

namespace offload {

struct Column {
  std::uintptr_t address;  // 0: no such column; it reads as 0, and what is stored there is dropped
  Dtype dtype;
};

// kResidual: where it is there, kParam is the bfloat16 half of a parameter in the split format; see split.h.
enum ColumnName { kParam, kResidual, kGrad, kState, kSecondState, kParamOut, kColumnCount };

struct Columns {
  Column at[kColumnCount];
  std::int64_t numel;
  float grad_scale;  // multiplies each gradient, once that is a float32
};

namespace {  // each instruction set its own copy

inline Columns slice(const Columns& columns, std::int64_t begin, std::int64_t end) {
  Columns part = columns;
  for (Column& column : part.at) {
    if (column.address) column.address += static_cast<std::uintptr_t>(begin * nbytes_of(column.dtype));
  }
  part.numel = end - begin;
  return part;
}

}  // namespace

// Elements per piece of work: below this, starting a thread was measured to cost more than it saves.
constexpr std::int64_t kStepGrain = 1 << 18;

// Throws std::invalid_argument; `who` starts the message. kParam and kGrad must be there.
void check_columns(const char* who, const Columns& columns, int num_threads);

// Throws std::invalid_argument for dtypes that no optimizer combines. A split parameter counts as float32.
void check_dtypes(const char* who, const Columns& columns);

// Calls run(slice) for pieces that together make up the columns. `run` must not throw.
void for_each_slice(const Columns& columns, int num_threads,
                    const std::function<void(const Columns& slice)>& run);

}  // namespace offload
