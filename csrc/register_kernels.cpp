#include <pybind11/stl.h>

#include "bindings.h"
#include "sum_of_squares.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace offload {

void register_kernels(py::module_& m) {
  py::enum_<Dtype>(m, "Dtype")
      .value("float32", Dtype::kFloat32)
      .value("bfloat16", Dtype::kBfloat16)
      .value("float16", Dtype::kFloat16);
  py::enum_<Isa>(m, "Isa")
      .value("portable", Isa::kPortable)
      .value("avx2", Isa::kAvx2)
      .value("avx512", Isa::kAvx512);

  m.def("supported_isas", &supported_isas);
  m.def("sum_of_squares", &sum_of_squares, "address"_a, "numel"_a, "dtype"_a, "num_threads"_a,
        "isa"_a = supported_isas().back(), "before"_a = 0.0, no_gil());
}

}  // namespace offload
