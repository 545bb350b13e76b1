#include "adam.h"
#include "bindings.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace offload {

void register_adam(py::module_& m) {
  py::class_<AdamOptions>(m, "AdamOptions")
      .def(py::init([](float lr, float beta1, float beta2, float eps, float weight_decay,
                       bool decoupled_weight_decay, bool bias_correction) {
             return AdamOptions{lr, beta1, beta2, eps, weight_decay, decoupled_weight_decay, bias_correction};
           }),
           py::kw_only(), "lr"_a, "beta1"_a, "beta2"_a, "eps"_a, "weight_decay"_a, "decoupled_weight_decay"_a,
           "bias_correction"_a);

  py::class_<AdamBuffers>(m, "AdamBuffers")
      .def(py::init([](std::uintptr_t param, std::uintptr_t grad, std::uintptr_t exp_avg,
                       std::uintptr_t exp_avg_sq, std::int64_t numel, Dtype param_dtype, Dtype grad_dtype,
                       Dtype state_dtype, float grad_scale, std::uintptr_t param_out, Dtype param_out_dtype) {
             return AdamBuffers{param,      grad,        exp_avg,    exp_avg_sq, numel,          param_dtype,
                                grad_dtype, state_dtype, grad_scale, param_out,  param_out_dtype};
           }),
           py::kw_only(), "param"_a, "grad"_a, "exp_avg"_a, "exp_avg_sq"_a, "numel"_a, "param_dtype"_a,
           "grad_dtype"_a, "state_dtype"_a, "grad_scale"_a = 1.0f, "param_out"_a = 0,
           "param_out_dtype"_a = Dtype::kFloat32);

  m.def("adam_step", &adam_step, "options"_a, "step"_a, "buffers"_a, "num_threads"_a, "isa"_a, no_gil());
  m.def("adam_rollback", &adam_rollback, "options"_a, "step"_a, "buffers"_a, "num_threads"_a, no_gil());
}

}  // namespace offload
