// One register function per subject; each lives in register_<subject>.cpp.
#pragma once

#include <pybind11/pybind11.h>

namespace offload {

void register_faults(pybind11::module_& m);
void register_io(pybind11::module_& m);
void register_pinned(pybind11::module_& m);
void register_kernels(pybind11::module_& m);
void register_adam(pybind11::module_& m);
void register_single_state(pybind11::module_& m);
void register_split(pybind11::module_& m);
void register_eight_bit(pybind11::module_& m);

using no_gil = pybind11::call_guard<pybind11::gil_scoped_release>;

}  // namespace offload
