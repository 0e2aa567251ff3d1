// Vectors of the widest registers that a variant is compiled for, in the compiler's own terms, and what is done with them.

#pragma once

#if defined(__AVX512F__)
#define TRANSMUTER_LANES 16
#else
#define TRANSMUTER_LANES 8
#endif

#include <utility>

namespace transmuter {
namespace {

constexpr int kLanes = TRANSMUTER_LANES;

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
typedef float Unaligned __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));
typedef int Lanes __attribute__((vector_size(kLanes * sizeof(int))));

[[gnu::always_inline]] inline Vector load(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }

[[gnu::always_inline]] inline void store(float* to, Vector value) { *reinterpret_cast<Unaligned*>(to) = value; }

#if defined(__clang__)
template <int Size, int... I>
[[gnu::always_inline]] inline void exchange(Vector& first, Vector& second, std::integer_sequence<int, I...>) {
  Vector before = first;
  first = __builtin_shufflevector(before, second, ((I & Size) ? I - Size + kLanes : I)...);
  second = __builtin_shufflevector(before, second, ((I & Size) ? I + kLanes : I + Size)...);
}
#else
template <int Size, int... I>
[[gnu::always_inline]] inline void exchange(Vector& first, Vector& second, std::integer_sequence<int, I...>) {
  Vector before = first;
  first = __builtin_shuffle(before, second, Lanes{((I & Size) ? I - Size + kLanes : I)...});
  second = __builtin_shuffle(before, second, Lanes{((I & Size) ? I + kLanes : I + Size)...});
}
#endif

// Exchanges the two blocks of `Size` that lie off the diagonal, in every block of twice that size.
template <int Size>
[[gnu::always_inline]] inline void exchange(Vector* rows) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i)
    if (!(i & Size)) exchange<Size>(rows[i], rows[i + Size], std::make_integer_sequence<int, kLanes>());
}

[[gnu::always_inline]] inline void transpose(Vector* rows) {
  exchange<1>(rows);
  exchange<2>(rows);
  exchange<4>(rows);
#if TRANSMUTER_LANES == 16
  exchange<8>(rows);
#endif
}

}  // namespace
}  // namespace transmuter
