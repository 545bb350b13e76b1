#include "columns.h"

#include <cmath>
#include <string>

#include "parallel.h"
#include "require.h"

namespace offload {
namespace {

bool dtypes_fit(Dtype param, Dtype grad, Dtype state) {
  if (param == Dtype::kFloat32) return state == Dtype::kFloat32;
  return grad == param && (state == Dtype::kFloat32 || state == param);
}

}  // namespace

void check_columns(const char* who, const Columns& columns, int num_threads) {
  require(num_threads >= 1, who, "num_threads must be at least 1, got " + std::to_string(num_threads));
  require(columns.numel >= 0, who, "numel must not be negative, got " + std::to_string(columns.numel));
  require(std::isfinite(columns.grad_scale), who,
          "grad_scale must be finite, got " + std::to_string(columns.grad_scale));
  const bool given = columns.at[kParam].address && columns.at[kGrad].address;
  require(given || columns.numel == 0, who,
          "null address for a buffer of " + std::to_string(columns.numel) + " elements");
}

void check_dtypes(const char* who, const Columns& columns) {
  const Dtype param = columns.at[kResidual].address ? Dtype::kFloat32 : columns.at[kParam].dtype;
  require(dtypes_fit(param, columns.at[kGrad].dtype, columns.at[kState].dtype), who,
          "no kernel for these dtypes: gradients share the parameters' dtype (float32 parameters also take "
          "16-bit gradients), moments are float32 or share it (float32 for float32 parameters)");
  require(!columns.at[kParamOut].address || param == Dtype::kFloat32, who,
          "param_out is a copy of float32 parameters; 16-bit ones need none");
}

void for_each_slice(const Columns& columns, int num_threads,
                    const std::function<void(const Columns& slice)>& run) {
  parallel_for(columns.numel, kStepGrain, num_threads,
               [&](std::int64_t begin, std::int64_t end) { run(slice(columns, begin, end)); });
}

}  // namespace offload
