#include "adam_kernel.h"

namespace offload {

AdamKernel adam_kernel_portable(const AdamBuffers& buffers) { return find_kernel<Portable>(buffers); }

}  // namespace offload
