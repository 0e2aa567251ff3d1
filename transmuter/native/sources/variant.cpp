// The kernels for one instruction set, which the compiler's options say.

#include "attention.h"
#include "convolution.h"
#include "few_bits.h"
#include "integer_product.h"
#include "product.h"
#include "quantization.h"

#if defined(__AVX512VNNI__)
#define TRANSMUTER_KERNELS kKernelsAvx512Vnni
#define TRANSMUTER_NAME "avx512vnni"
#elif defined(__AVX512F__)
#define TRANSMUTER_KERNELS kKernelsAvx512
#define TRANSMUTER_NAME "avx512"
#else
#define TRANSMUTER_KERNELS kKernelsAvx2
#define TRANSMUTER_NAME "avx2"
#endif

namespace transmuter {

extern "C" const Kernels TRANSMUTER_KERNELS = {
    TRANSMUTER_NAME, product, integer_product, quantization, convolution, attention, attention_gradients, few_bits};

}  // namespace transmuter
