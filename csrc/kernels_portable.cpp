#include "kernels_of.h"

namespace offload {

const Kernels& kernels_portable() { return kKernelsOf<Portable>; }

}  // namespace offload
