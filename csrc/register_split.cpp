#include "bindings.h"
#include "split.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace offload {

void register_split(py::module_& m) {
  py::class_<SplitBuffers>(m, "SplitBuffers")
      .def(py::init([](std::uintptr_t param16, std::uintptr_t residual, std::uintptr_t grad,
                       std::uintptr_t exp_avg, std::uintptr_t exp_avg_sq, std::int64_t numel,
                       Dtype grad_dtype, float grad_scale) {
             return SplitBuffers{param16, residual, grad, exp_avg, exp_avg_sq, numel, grad_dtype, grad_scale};
           }),
           py::kw_only(), "param16"_a, "residual"_a, "grad"_a, "exp_avg"_a, "exp_avg_sq"_a, "numel"_a,
           "grad_dtype"_a, "grad_scale"_a = 1.0f);

  const Isa best = supported_isas().back();
  m.def("adam_step_split", &adam_step_split, "options"_a, "step"_a, "buffers"_a, "num_threads"_a, "isa"_a,
        no_gil());
  m.def("split_encode", &split_encode, "master"_a, "param16"_a, "residual"_a, "numel"_a, "num_threads"_a,
        "isa"_a = best, no_gil());
  m.def("split_decode", &split_decode, "param16"_a, "residual"_a, "master"_a, "numel"_a, "num_threads"_a,
        "isa"_a = best, no_gil());
}

}  // namespace offload
