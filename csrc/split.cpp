#include "split.h"

#include <string>

#include "adam_scalars.h"
#include "columns.h"
#include "kernels.h"
#include "parallel.h"
#include "require.h"

namespace offload {
namespace {

constexpr const char* kWho = "split";

Columns columns_of(const SplitBuffers& buffers) {
  return {{{buffers.param16, Dtype::kBfloat16},
           {buffers.residual, Dtype::kInt16},
           {buffers.grad, buffers.grad_dtype},
           {buffers.exp_avg, Dtype::kFloat32},
           {buffers.exp_avg_sq, Dtype::kFloat32},
           {0, Dtype::kFloat32}},
          buffers.numel,
          buffers.grad_scale};
}

// The weights take the place of the gradient, so that a slice moves along both forms.
Columns columns_of(std::uintptr_t master, std::uintptr_t param16, std::uintptr_t residual,
                   std::int64_t numel) {
  return {{{param16, Dtype::kBfloat16},
           {residual, Dtype::kInt16},
           {master, Dtype::kFloat32},
           {0, Dtype::kFloat32},
           {0, Dtype::kFloat32},
           {0, Dtype::kFloat32}},
          numel,
          1};
}

void check_residual(const Columns& columns) {
  require(columns.at[kResidual].address || columns.numel == 0, kWho,
          "null address for a residual of " + std::to_string(columns.numel) + " elements");
}

}  // namespace

void adam_step_split(const AdamOptions& options, std::int64_t step, const SplitBuffers& buffers,
                     int num_threads, Isa isa) {
  check_adam_options(options, step);
  const Columns columns = columns_of(buffers);
  check_columns(kWho, columns, num_threads);
  check_residual(columns);
  require((buffers.exp_avg && buffers.exp_avg_sq) || buffers.numel == 0, kWho,
          "null address for moments of " + std::to_string(buffers.numel) + " elements");
  const Kernels& kernels = kernels_for(isa);
  const AdamScalars scalars = adam_scalars(options, step);
  for_each_slice(columns, num_threads, [&](const Columns& slice) { kernels.adam(scalars, slice); });
}

void split_encode(std::uintptr_t master, std::uintptr_t param16, std::uintptr_t residual, std::int64_t numel,
                  int num_threads, Isa isa) {
  const Columns columns = columns_of(master, param16, residual, numel);
  check_columns(kWho, columns, num_threads);
  check_residual(columns);
  const Kernels& kernels = kernels_for(isa);
  for_each_slice(columns, num_threads,
                 [&](const Columns& slice) { kernels.split_encode(slice.at[kGrad], slice); });
}

void split_decode(std::uintptr_t param16, std::uintptr_t residual, std::uintptr_t master, std::int64_t numel,
                  int num_threads, Isa isa) {
  const Columns columns = columns_of(master, param16, residual, numel);
  check_columns(kWho, columns, num_threads);
  check_residual(columns);
  const Kernels& kernels = kernels_for(isa);
  for_each_slice(columns, num_threads,
                 [&](const Columns& slice) { kernels.split_decode(slice, slice.at[kGrad]); });
}

}  // namespace offload
