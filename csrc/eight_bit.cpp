#include "eight_bit.h"

#include <string>

#include "adam_scalars.h"
#include "columns.h"
#include "kernels.h"
#include "parallel.h"
#include "require.h"

namespace offload {
namespace {

constexpr const char* kWho = "8-bit adam";
static_assert(kStepGrain % kMomentBlock == 0);

Columns columns_of(const EightBitBuffers& buffers) {
  return {{{buffers.param16, Dtype::kBfloat16},
           {buffers.residual, Dtype::kInt16},
           {buffers.grad, buffers.grad_dtype},
           {0, Dtype::kFloat32},
           {0, Dtype::kFloat32},
           {0, Dtype::kFloat32}},
          buffers.numel,
          buffers.grad_scale};
}

Moment moment_at(const Moment& start, std::int64_t index) {
  return {start.codes + static_cast<std::uintptr_t>(index),
          start.scales + static_cast<std::uintptr_t>(index / kMomentBlock) * sizeof(float)};
}

// Neighbouring steps get seeds that differ in many bits.
std::uint32_t seed_of(std::int64_t step) { return static_cast<std::uint32_t>(step) * 0x9e3779b9u; }

void check_conversion(std::uintptr_t values, const Moment& moment, std::int64_t numel, int num_threads) {
  require(num_threads >= 1, kWho, "num_threads must be at least 1, got " + std::to_string(num_threads));
  require(numel >= 0, kWho, "numel must not be negative, got " + std::to_string(numel));
  require((values && moment.codes && moment.scales) || numel == 0, kWho,
          "null address for a moment of " + std::to_string(numel) + " elements");
}

}  // namespace

void adam_step_8bit(const AdamOptions& options, std::int64_t step, const EightBitBuffers& buffers,
                    int num_threads, Isa isa) {
  check_adam_options(options, step);
  const Columns columns = columns_of(buffers);
  check_columns(kWho, columns, num_threads);
  const Moment exp_avg{buffers.exp_avg8, buffers.exp_avg8_scale};
  const Moment exp_avg_sq{buffers.exp_avg_sq8, buffers.exp_avg_sq8_scale};
  const bool all_given =
      buffers.residual && exp_avg.codes && exp_avg.scales && exp_avg_sq.codes && exp_avg_sq.scales;
  require(all_given || buffers.numel == 0, kWho,
          "null address for a buffer of " + std::to_string(buffers.numel) + " elements");
  const Kernels& kernels = kernels_for(isa);
  const AdamScalars scalars = adam_scalars(options, step);
  parallel_for(buffers.numel, kStepGrain, num_threads, [&](std::int64_t begin, std::int64_t end) {
    const Moments moments{moment_at(exp_avg, begin), moment_at(exp_avg_sq, begin)};
    kernels.adam_8bit(scalars, slice(columns, begin, end), moments, seed_of(step));
  });
}

void encode_8bit(std::uintptr_t values, std::uintptr_t codes, std::uintptr_t scales, std::int64_t numel,
                 bool is_signed, int num_threads, Isa isa) {
  const Moment moment{codes, scales};
  check_conversion(values, moment, numel, num_threads);
  const Kernels& kernels = kernels_for(isa);
  const auto encode = is_signed ? kernels.encode_signed : kernels.encode_unsigned;
  parallel_for(numel, kStepGrain, num_threads, [&](std::int64_t begin, std::int64_t end) {
    encode(reinterpret_cast<const float*>(values) + begin, moment_at(moment, begin), end - begin);
  });
}

void decode_8bit(std::uintptr_t codes, std::uintptr_t scales, std::uintptr_t values, std::int64_t numel,
                 bool is_signed, int num_threads, Isa isa) {
  const Moment moment{codes, scales};
  check_conversion(values, moment, numel, num_threads);
  const Kernels& kernels = kernels_for(isa);
  const auto decode = is_signed ? kernels.decode_signed : kernels.decode_unsigned;
  parallel_for(numel, kStepGrain, num_threads, [&](std::int64_t begin, std::int64_t end) {
    decode(moment_at(moment, begin), reinterpret_cast<float*>(values) + begin, end - begin);
  });
}

}  // namespace offload
