#include "bindings.h"
#include "eight_bit.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace offload {

void register_eight_bit(py::module_& m) {
  py::class_<EightBitBuffers>(m, "EightBitBuffers")
      .def(py::init([](std::uintptr_t param16, std::uintptr_t residual, std::uintptr_t grad, Dtype grad_dtype,
                       float grad_scale, std::uintptr_t exp_avg8, std::uintptr_t exp_avg8_scale,
                       std::uintptr_t exp_avg_sq8, std::uintptr_t exp_avg_sq8_scale, std::int64_t numel) {
             return EightBitBuffers{param16,  residual,       grad,        grad_dtype,        grad_scale,
                                    exp_avg8, exp_avg8_scale, exp_avg_sq8, exp_avg_sq8_scale, numel};
           }),
           py::kw_only(), "param16"_a, "residual"_a, "grad"_a, "grad_dtype"_a, "grad_scale"_a = 1.0f,
           "exp_avg8"_a, "exp_avg8_scale"_a, "exp_avg_sq8"_a, "exp_avg_sq8_scale"_a, "numel"_a);

  const Isa best = supported_isas().back();
  m.attr("MOMENT_BLOCK") = kMomentBlock;
  m.def("adam_step_8bit", &adam_step_8bit, "options"_a, "step"_a, "buffers"_a, "num_threads"_a, "isa"_a,
        no_gil());
  m.def("encode_8bit", &encode_8bit, "values"_a, "codes"_a, "scales"_a, "numel"_a, "is_signed"_a,
        "num_threads"_a, "isa"_a = best, no_gil());
  m.def("decode_8bit", &decode_8bit, "codes"_a, "scales"_a, "values"_a, "numel"_a, "is_signed"_a,
        "num_threads"_a, "isa"_a = best, no_gil());
}

}  // namespace offload
