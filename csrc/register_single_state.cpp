#include "bindings.h"
#include "single_state.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace offload {

void register_single_state(py::module_& m) {
  py::class_<LionOptions>(m, "LionOptions")
      .def(py::init([](float lr, float beta1, float beta2, float weight_decay) {
             return LionOptions{lr, beta1, beta2, weight_decay};
           }),
           py::kw_only(), "lr"_a, "beta1"_a, "beta2"_a, "weight_decay"_a);

  py::class_<AdagradOptions>(m, "AdagradOptions")
      .def(py::init([](float lr, float eps, float weight_decay, float lr_decay) {
             return AdagradOptions{lr, eps, weight_decay, lr_decay};
           }),
           py::kw_only(), "lr"_a, "eps"_a, "weight_decay"_a, "lr_decay"_a = 0.0f);

  py::class_<SgdOptions>(m, "SgdOptions")
      .def(py::init([](float lr, float momentum, double dampening, float weight_decay, bool nesterov) {
             return SgdOptions{lr, momentum, dampening, weight_decay, nesterov};
           }),
           py::kw_only(), "lr"_a, "momentum"_a, "dampening"_a, "weight_decay"_a, "nesterov"_a);

  py::class_<SingleStateBuffers>(m, "SingleStateBuffers")
      .def(py::init([](std::uintptr_t param, std::uintptr_t grad, std::uintptr_t state, std::int64_t numel,
                       Dtype grad_dtype, float grad_scale, std::uintptr_t param_out, Dtype param_out_dtype,
                       std::uintptr_t residual, Dtype param_dtype, Dtype state_dtype) {
             return SingleStateBuffers{param,      residual,    grad,           state,
                                       numel,      param_dtype, grad_dtype,     state_dtype,
                                       grad_scale, param_out,   param_out_dtype};
           }),
           py::kw_only(), "param"_a, "grad"_a, "state"_a, "numel"_a, "grad_dtype"_a, "grad_scale"_a = 1.0f,
           "param_out"_a = 0, "param_out_dtype"_a = Dtype::kFloat32, "residual"_a = 0,
           "param_dtype"_a = Dtype::kFloat32, "state_dtype"_a = Dtype::kFloat32);

  m.def("lion_step", &lion_step, "options"_a, "step"_a, "buffers"_a, "num_threads"_a, "isa"_a, no_gil());
  m.def("adagrad_step", &adagrad_step, "options"_a, "step"_a, "buffers"_a, "num_threads"_a, "isa"_a,
        no_gil());
  m.def("sgd_step", &sgd_step, "options"_a, "step"_a, "buffers"_a, "num_threads"_a, "isa"_a, no_gil());
}

}  // namespace offload
