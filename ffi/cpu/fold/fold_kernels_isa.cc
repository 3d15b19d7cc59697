// fold_kernels_isa.cc: the fold kernels, compiled once for each instruction set (JAX_RING_ISA names it).
// Only this file gets special compiler flags, and it includes nothing that could emit shared inline code.
#include "cpu/fold/fold_kernels.h"
#include "cpu/fold/packed_floats.h"

namespace jax_ring::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kRegisterBytes = 64;
#elif defined(__AVX2__)
constexpr int kRegisterBytes = 32;
#else
constexpr int kRegisterBytes = 16;
#endif

// A streaming store bypasses the cache. That saves reading a line only to overwrite it.
template <class V>
JAX_RING_INLINE void stream(void* to, V value) {
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64) return _mm512_stream_si512(static_cast<__m512i*>(to), bit_cast<__m512i>(value));
#endif
#if defined(__AVX2__)
  if constexpr (sizeof(V) == 32) return _mm256_stream_si256(static_cast<__m256i*>(to), bit_cast<__m256i>(value));
#endif
#if defined(__x86_64__)
  if constexpr (sizeof(V) == 16) return _mm_stream_si128(static_cast<__m128i*>(to), bit_cast<__m128i>(value));
  if constexpr (sizeof(V) == 8) return _mm_stream_si64(static_cast<long long*>(to), bit_cast<long long>(value));
  if constexpr (sizeof(V) == 4) return _mm_stream_si32(static_cast<int*>(to), bit_cast<int>(value));
#endif
  __builtin_memcpy(to, &value, sizeof(value));
}

// A small float with sums that are not rounded to it.
template <class Small>
struct Unrounded {
  using Storage = typename Small::Storage;
  using Accumulator = float;
  template <class Lanes = Scalar>
  static JAX_RING_INLINE typename Lanes::template Of<float> widen(typename Lanes::template Of<Storage> x) {
    return Small::template widen<Lanes>(x);
  }
  template <class Lanes = Scalar>
  static JAX_RING_INLINE typename Lanes::template Of<float> narrow(typename Lanes::template Of<float> x) {
    return x;
  }
};

// A float32 in place of the small float to which it rounds. Its sums are not rounded.
template <class Small>
struct Rounded {
  using Storage = float;
  using Accumulator = float;
  template <class Lanes = Scalar>
  static JAX_RING_INLINE typename Lanes::template Of<float> widen(typename Lanes::template Of<float> x) {
    return Small::template value_of<Lanes>(Small::template code_of<Lanes>(x));
  }
  template <class Lanes = Scalar>
  static JAX_RING_INLINE typename Lanes::template Of<float> narrow(typename Lanes::template Of<float> x) {
    return x;
  }
};

// The type of a result.
template <class Element>
struct ResultOf {
  using type = typename Element::Storage;
};
template <class Small>
struct ResultOf<Unrounded<Small>> {
  using type = float;
};

// If converting the elements takes most of the time and code, use fewer copies of that code.
template <class Element>
constexpr bool kConvertsFast = sizeof(typename Element::Storage) == sizeof(typename Element::Accumulator);
template <>
constexpr bool kConvertsFast<BFloat16> = true;

// The shapes of a fold. Small perfect trees need no decision within a block.
struct InSequence {
  template <class Element, class Op, class Lanes, int kVectors, class Load, class Store>
  static JAX_RING_INLINE void fold(const Inputs& inputs, Load load, Store store) {
    fold_ranks<Element, Op, Lanes, kVectors>(inputs.count, load, store, Op{});
  }
};
template <int kTerms>
struct AlongPerfectTree {
  template <class Element, class Op, class Lanes, int kVectors, class Load, class Store>
  static JAX_RING_INLINE void fold(const Inputs&, Load load, Store store) {
    fold_subtree<Element, Lanes, kVectors, kTerms>(0, load, Op{}).finish(store);
  }
};
struct AlongTree {
  template <class Element, class Op, class Lanes, int kVectors, class Load, class Store>
  static JAX_RING_INLINE void fold(const Inputs& inputs, Load load, Store store) {
    constexpr bool kUnrolled = !std::is_same_v<Lanes, Scalar> && sizeof(typename Element::Storage) > 1;
    fold_tree<Element, Op, Lanes, kVectors, kUnrolled>(inputs.count, inputs.subtrees, load, store, Op{});
  }
};

// Folds whole blocks of `kVectors` registers, starting at element `at`. Returns the first remaining element.
template <class Element, class Op, class Shape, class Lanes, int kVectors, bool kStream>
size_t fold_blocks(const Inputs& inputs, const Outputs& outputs, size_t at, size_t end) {
  using Storage = typename Element::Storage;
  using Result = typename ResultOf<Element>::type;
  using Stored = typename Lanes::template Of<Result>;
  constexpr size_t kLanes = sizeof(Stored) / sizeof(Result);
  for (; at + kVectors * kLanes <= end; at += kVectors * kLanes) {
    Stored results[kVectors];
    const auto load = [&](int i, int v) __attribute__((always_inline)) {
      typename Lanes::template Of<Storage> loaded;
      __builtin_memcpy(&loaded, static_cast<const Storage*>(inputs.buffers[i]) + inputs.begin + at + v * kLanes,
                       sizeof(loaded));
      return loaded;
    };
    const auto store = [&](int v, Stored value) __attribute__((always_inline)) { results[v] = value; };
    Shape::template fold<Element, Op, Lanes, kVectors>(inputs, load, store);
    for (int i = 0; i < outputs.count; ++i) {
      for (int v = 0; v < kVectors; ++v) {
        Result* to = static_cast<Result*>(outputs.buffers[i]) + outputs.begin + at + v * kLanes;
        if constexpr (kStream) {
          stream(to, results[v]);
        } else {
          __builtin_memcpy(to, &results[v], sizeof(results[v]));
        }
      }
    }
  }
  return at;
}

// How to fold blocks of an element type. A block covers whole cache lines of every rank, and its accumulators, 4
// registers of 16 values, stay in registers.
template <class ElementT, class OpT, bool kIsPacked>
struct InVectors {
  using Element = ElementT;
  using Op = OpT;
  using Lanes = Vector<kRegisterBytes / sizeof(typename ResultOf<Element>::type)>;
  static constexpr int kVectors = 4;
};
template <class ElementT, class OpT>
struct InVectors<ElementT, OpT, true> {
  using Element = Packed<ElementT>;
  using Op = PartByPart<OpT>;
  using Lanes = PackedLanes<kRegisterBytes, sizeof(typename Element::Storage)>;
  static constexpr int kVectors = 4 / Lanes::kParts;
};

template <class Element, class Op, class Shape>
void fold_in_shape(const Inputs& inputs, const Outputs& outputs, size_t count, bool streaming) {
  constexpr bool kIsPacked = sizeof(typename ResultOf<Element>::type) < sizeof(typename Element::Accumulator);
  using Vectors = InVectors<Element, Op, kIsPacked>;
  const auto fold_vectors = [&](auto stream, size_t at) {
    return fold_blocks<typename Vectors::Element, typename Vectors::Op, Shape, typename Vectors::Lanes,
                       Vectors::kVectors, decltype(stream)::value>(inputs, outputs, at, count);
  };
  size_t at = 0;
  if (streaming) {
    at = fold_vectors(std::true_type{}, at);
#if defined(__x86_64__)
    _mm_sfence();  // the store that signals completion is not ordered with streaming stores
#endif
  }
  at = fold_vectors(std::false_type{}, at);
  // The remainder needs no code of its own for a perfect tree.
  using ShapeOfRest = std::conditional_t<std::is_same_v<Shape, InSequence>, InSequence, AlongTree>;
  fold_blocks<Element, Op, ShapeOfRest, Scalar, 1, false>(inputs, outputs, at, count);
}

// Only sums of floats depend on the parentheses.
template <class Element, class Op>
constexpr bool kDependsOnTree = false;
template <class Element>
constexpr bool kDependsOnTree<Element, Sum> = IsFloating<typename Element::Accumulator>::value;

template <class Element, class Op>
void fold(const Inputs& inputs, const Outputs& outputs, size_t count, bool streaming) {
  if constexpr (kDependsOnTree<Element, Op>) {
    if (inputs.subtrees != nullptr) {
      if constexpr (kConvertsFast<Element>) {
        const bool is_perfect = inputs.subtrees[0].num_terms == inputs.count;
        if (is_perfect && inputs.count == 4) {
          return fold_in_shape<Element, Op, AlongPerfectTree<4>>(inputs, outputs, count, streaming);
        }
        if (is_perfect && inputs.count == 8) {
          return fold_in_shape<Element, Op, AlongPerfectTree<8>>(inputs, outputs, count, streaming);
        }
      }
      return fold_in_shape<Element, Op, AlongTree>(inputs, outputs, count, streaming);
    }
  }
  fold_in_shape<Element, Op, InSequence>(inputs, outputs, count, streaming);
}

// The values of codes with one scale. The product is exact. Codes beyond 126 stand for non-finite values.
template <class Lanes>
JAX_RING_INLINE typename Lanes::template Of<float> values_of(typename Lanes::template Of<int8_t> codes, float scale) {
  using Floats = typename Lanes::template Of<float>;
  const auto code = Lanes::template convert<int32_t>(codes);
  const Floats zero = {};
  const Floats finite = Lanes::template convert<float>(code) * scale;
  const Floats infinite = code > 0 ? zero + __builtin_inff() : zero - __builtin_inff();
  const Floats special = code == -128 ? zero + __builtin_nanf("") : infinite;
  return (code > 126) | (code < -126) ? special : finite;
}

template <bool kStream>
void decode_packets(const Inputs& inputs, const Outputs& outputs, size_t count) {
  using Lanes = Vector<kRegisterBytes / sizeof(float)>;
  constexpr size_t kLanes = kRegisterBytes / sizeof(float);
  const int8_t* packet = static_cast<const int8_t*>(inputs.buffers[0]) + inputs.begin * kPacketBytes;
  for (size_t group = outputs.begin; group < outputs.begin + count; ++group, packet += kPacketBytes) {
    float scale;
    __builtin_memcpy(&scale, packet + kGroupElements, sizeof(scale));
    for (size_t at = 0; at < kGroupElements; at += kLanes) {
      Lanes::Of<int8_t> codes;
      __builtin_memcpy(&codes, packet + at, sizeof(codes));
      const auto values = values_of<Lanes>(codes, scale);
      for (int i = 0; i < outputs.count; ++i) {
        float* const to = static_cast<float*>(outputs.buffers[i]) + group * kGroupElements + at;
        if constexpr (kStream) {
          stream(to, values);
        } else {
          __builtin_memcpy(to, &values, sizeof(values));
        }
      }
    }
  }
}

void decode(const Inputs& inputs, const Outputs& outputs, size_t count, bool streaming) {
  if (!streaming) return decode_packets<false>(inputs, outputs, count);
  decode_packets<true>(inputs, outputs, count);
#if defined(__x86_64__)
  _mm_sfence();  // as in fold_in_shape
#endif
}

}  // namespace

#define JAX_RING_CONCAT_(a, b) a##b
#define JAX_RING_CONCAT(a, b) JAX_RING_CONCAT_(a, b)
#define JAX_RING_STRING_(a) #a
#define JAX_RING_STRING(a) JAX_RING_STRING_(a)

extern const FoldKernels JAX_RING_CONCAT(fold_kernels_, JAX_RING_ISA);
const FoldKernels JAX_RING_CONCAT(fold_kernels_, JAX_RING_ISA) = {
    JAX_RING_STRING(JAX_RING_ISA),
    {
#define JAX_RING_SUM(name, element) &fold<FoldedAs<element, Sum>::type, Sum>,
#define JAX_RING_MAX(name, element) &fold<element, Max>,
#define JAX_RING_MIN(name, element) &fold<element, Min>,
        {JAX_RING_FOR_EACH_DTYPE(JAX_RING_SUM)},
        {JAX_RING_FOR_EACH_DTYPE(JAX_RING_MAX)},
        {JAX_RING_FOR_EACH_DTYPE(JAX_RING_MIN)},
    },
    &decode,
    {&fold_in_shape<Unrounded<Float16>, Sum, InSequence>, &fold_in_shape<Rounded<Float16>, Sum, InSequence>},
    {&fold_in_shape<Unrounded<BFloat16>, Sum, InSequence>, &fold_in_shape<Rounded<BFloat16>, Sum, InSequence>},
};

}  // namespace jax_ring::cpu
