// What XLA calls: decodes a call's buffers and attributes, and runs the kernel of the processor's instruction set.

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>

#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace transmuter {
namespace {

// The variants, best first; the one of this name, or of any name, that the processor has the instructions for.
const Kernels* runnable(const char* name) {
  const auto is_wanted = [name](const Kernels& kernels) { return !name || std::strcmp(name, kernels.name) == 0; };
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  if (is_wanted(kKernelsAvx512Vnni) && has_avx512 && __builtin_cpu_supports("avx512vnni"))
    return &kKernelsAvx512Vnni;
  if (is_wanted(kKernelsAvx512) && has_avx512) return &kKernelsAvx512;
  if (is_wanted(kKernelsAvx2) && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &kKernelsAvx2;
#endif
  return nullptr;
}

std::atomic<const Kernels*> chosen{runnable(nullptr)};

class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  void* at_least(size_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = (bytes + 4095) / 4096 * 4096;
      data_ = std::aligned_alloc(64, size_);
    }
    return data_;
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

void* scratch(int slot, size_t bytes) {
  static thread_local Scratch slots[4];
  return slots[slot].at_least(bytes);
}

// Work that threads of XLA's pool share with the thread that brought it. That one never waits for a thread that has not
// begun: the pool's threads may all be busy, or wait as it does.
struct Shared {
  std::atomic<long> next{0};
  std::atomic<long> done{0};
  long count;
  void (*task)(void*, long);
  void* context;
  std::mutex mutex;
  std::condition_variable finished;

  void help() {
    for (long i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
      task(context, i);
      if (done.fetch_add(1) + 1 == count) {
        std::lock_guard<std::mutex> lock(mutex);
        finished.notify_all();
      }
    }
  }
};

void run(const Tasks& tasks, long count, void (*task)(void*, long), void* context) {
  auto* pool = static_cast<ffi::ThreadPool*>(tasks.pool);
  const long helpers = std::min(tasks.threads, count) - 1;
  if (helpers <= 0) {
    for (long i = 0; i < count; ++i) task(context, i);
    return;
  }
  auto shared = std::make_shared<Shared>();
  shared->count = count;
  shared->task = task;
  shared->context = context;
  for (long i = 0; i < helpers; ++i) pool->Schedule([shared] { shared->help(); });
  shared->help();
  for (int spin = 0; spin < 20000 && shared->done.load() < count; ++spin) __builtin_ia32_pause();
  if (shared->done.load() < count) {
    std::unique_lock<std::mutex> lock(shared->mutex);
    shared->finished.wait(lock, [&] { return shared->done.load() == count; });
  }
}

// Runs a kernel of the chosen variant on the threads of XLA's pool.
template <typename Work>
ffi::Error run_kernel(ffi::ThreadPool& pool, void (*Kernels::*kernel)(const Work&, const Tasks&), const Work& work) {
  const Kernels* kernels = chosen.load();
  if (kernels == nullptr) return ffi::Error(ffi::ErrorCode::kUnimplemented, "this processor has no kernels");
  (kernels->*kernel)(work, Tasks{static_cast<long>(pool.num_threads()), run, scratch, &pool});
  return ffi::Error::Success();
}

using Strides = ffi::Span<const int64_t>;

ffi::Error product(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> left, ffi::Buffer<ffi::F32> right,
                   ffi::ResultBuffer<ffi::F32> result, Strides sizes, Strides left_strides, Strides right_strides,
                   Strides result_strides, bool is_packed) {
  Product p;
  for (int i = 0; i < kBatchDimensions; ++i) {
    p.batch[i] = sizes[i];
    p.left_batch[i] = left_strides[i];
    p.right_batch[i] = right_strides[i];
    p.result_batch[i] = result_strides[i];
  }
  p.rows = sizes[3], p.depth = sizes[4], p.columns = sizes[5];
  p.left_row = left_strides[3], p.left_depth = left_strides[4];
  p.right_depth = right_strides[3], p.right_column = right_strides[4];
  p.result_row = result_strides[3];
  p.left = left.typed_data(), p.right = right.typed_data(), p.result = result->typed_data();
  p.is_packed = is_packed;
  return run_kernel(pool, &Kernels::product, p);
}

ffi::Error integer_product(ffi::ThreadPool pool, ffi::AnyBuffer left, ffi::Buffer<ffi::S8> right,
                           ffi::Buffer<ffi::S32> first, ffi::ResultBuffer<ffi::S32> result) {
  IntegerProduct p;
  p.depth = left.dimensions().back(), p.columns = result->dimensions().back();
  p.rows = p.columns == 0 ? 0 : static_cast<long>(result->element_count()) / p.columns;
  p.left = static_cast<const uint8_t*>(left.untyped_data()), p.is_signed = left.element_type() == ffi::S8;
  p.right = right.typed_data(), p.first = first.typed_data(), p.result = result->typed_data();
  return run_kernel(pool, &Kernels::integer_product, p);
}

ffi::Error quantization(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> values, ffi::ResultBuffer<ffi::U8> steps,
                        ffi::ResultBuffer<ffi::F32> scale, ffi::ResultBuffer<ffi::U8> zero) {
  const Quantization q{static_cast<long>(values.element_count()), values.typed_data(), steps->typed_data(),
                       scale->typed_data(), zero->typed_data()};
  return run_kernel(pool, &Kernels::quantization, q);
}

// The arguments are the two of input, output and kernel that are not wanted, in this order.
ffi::Error convolution(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> first, ffi::Buffer<ffi::F32> second,
                       ffi::ResultBuffer<ffi::F32> result, int64_t wanted, Strides sizes, Strides window, Strides kernel,
                       bool is_packed) {
  Convolution c;
  c.wanted = static_cast<Convolution::Wanted>(wanted);
  c.batch = sizes[0], c.groups = sizes[1], c.channels = sizes[2], c.features = sizes[3];
  for (int d = 0; d < 2; ++d) {
    c.input_size[d] = sizes[4 + d], c.output_size[d] = sizes[6 + d], c.kernel_size[d] = sizes[8 + d];
    c.stride[d] = window[d], c.dilation[d] = window[2 + d], c.low[d] = window[4 + d];
  }
  for (int i = 0; i < 4; ++i) c.kernel_step[i] = kernel[i];
  c.is_packed = is_packed;
  float* const given[] = {first.typed_data(), second.typed_data()};
  float* const made = result->typed_data();
  c.input = wanted == Convolution::kInput ? made : given[0];
  c.output = wanted == Convolution::kOutput ? made : given[wanted == Convolution::kInput ? 0 : 1];
  c.kernel = wanted == Convolution::kKernel ? made : given[1];
  return run_kernel(pool, &Kernels::convolution, c);
}

// The arguments are query, key and value, the gradients of the output if theirs are wanted, and the bias if there is any.
// Of each, and then of each result, there are four steps.
ffi::Error attention(ffi::ThreadPool pool, ffi::RemainingArgs arguments, ffi::RemainingRets results, Strides sizes,
                     Strides steps, double scale) {
  Attention a{};
  a.batch = sizes[0], a.heads = sizes[1], a.queries = sizes[2], a.keys = sizes[3], a.depth = sizes[4];
  a.width = sizes[5], a.scale = static_cast<float>(scale);
  const bool is_gradient = results.size() == 3;
  Strided* const given[] = {&a.query, &a.key, &a.value, is_gradient ? &a.output : &a.bias, &a.bias};
  Strided* const made[] = {is_gradient ? &a.query_gradient : &a.output, &a.key_gradient, &a.value_gradient};
  const size_t count = arguments.size();
  if (count > 5 || results.size() > 3 || steps.size() != 4 * (count + results.size()) || sizes.size() != 6)
    return ffi::Error::InvalidArgument("attention has other operands");
  if (std::count(sizes.begin(), sizes.end(), 0) > 0) return ffi::Error::InvalidArgument("attention has no size of 0");
  for (size_t i = 0; i < count + results.size(); ++i) {
    Strided& strided = *(i < count ? given[i] : made[i - count]);
    if (i < count)
      strided.data = static_cast<float*>(arguments.get<ffi::AnyBuffer>(i)->untyped_data());
    else
      strided.data = static_cast<float*>((*results.get<ffi::AnyBuffer>(i - count))->untyped_data());
    for (int d = 0; d < 4; ++d) strided.step[d] = steps[4 * i + d];
  }
  return run_kernel(pool, is_gradient ? &Kernels::attention_gradients : &Kernels::attention, a);
}

// Zero points follow, if there are any.
ffi::Error few_bits(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> left, ffi::Buffer<ffi::S32> right,
                    ffi::Buffer<ffi::F32> scales, ffi::RemainingArgs zeros, ffi::ResultBuffer<ffi::F32> result,
                    int64_t bits) {
  FewBits p{};
  p.rows = left.dimensions()[0], p.depth = left.dimensions()[1], p.columns = result->dimensions()[1];
  p.blocks = scales.dimensions()[1], p.bits = static_cast<int>(bits);
  p.left = left.typed_data(), p.right = right.typed_data(), p.scales = scales.typed_data();
  if (zeros.size() > 0) {
    const auto given = zeros.get<ffi::AnyBuffer>(0);
    if (!given.has_value()) return given.error();
    p.zeros = given->untyped_data(), p.has_float_zeros = given->element_type() == ffi::F32;
  }
  p.result = result->typed_data();
  return run_kernel(pool, &Kernels::few_bits, p);
}

}  // namespace
}  // namespace transmuter

extern "C" const char* transmuter_variant() {
  const transmuter::Kernels* kernels = transmuter::chosen.load();
  return kernels == nullptr ? "" : kernels->name;
}

// Later calls run this variant, if the processor can: 1, else 0.
extern "C" int transmuter_choose(const char* name) {
  const transmuter::Kernels* kernels = transmuter::runnable(name);
  if (kernels != nullptr) transmuter::chosen.store(kernels);
  return kernels != nullptr;
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(transmuter_attention, transmuter::attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<ffi::Span<const int64_t>>("sizes")
                                  .Attr<ffi::Span<const int64_t>>("steps")
                                  .Attr<double>("scale"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(transmuter_product, transmuter::product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<ffi::Span<const int64_t>>("sizes")
                                  .Attr<ffi::Span<const int64_t>>("left")
                                  .Attr<ffi::Span<const int64_t>>("right")
                                  .Attr<ffi::Span<const int64_t>>("result")
                                  .Attr<bool>("is_packed"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(transmuter_integer_product, transmuter::integer_product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S8>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(transmuter_quantization, transmuter::quantization,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::U8>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::U8>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(transmuter_convolution, transmuter::convolution,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("wanted")
                                  .Attr<ffi::Span<const int64_t>>("sizes")
                                  .Attr<ffi::Span<const int64_t>>("window")
                                  .Attr<ffi::Span<const int64_t>>("kernel")
                                  .Attr<bool>("is_packed"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(transmuter_few_bits, transmuter::few_bits,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("bits"));
