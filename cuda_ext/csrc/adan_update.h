// The Adan update of one element, written once: every kernel, CPU and CUDA alike, calls this function.
//
// Mathematics (Xie et al., arXiv 2208.06677, in the convention where beta is the share that is kept):
//
//     g      <- gradient_scale * gradient        (loss scale, clipping and the sign of `maximize`)
//     d       = g - g_prev                       (0 at the parameter's first step)
//     m      <- b1 m + (1 - b1) g
//     v      <- b2 v + (1 - b2) d
//     n      <- b3 n + (1 - b3) (g + b2 d)^2
//     u       = (m / (1 - b1^t) + b2 v / (1 - b2^t)) / (sqrt(n) / sqrt(1 - b3^t) + eps)
//     theta  <- shrink theta - rate u
//     g_prev <- g
//
// Both kinds of weight decay are one expression: the proximal kind has shrink = 1 / (1 + lr wd) and
// rate = lr shrink, the other has shrink = 1 - lr wd and rate = lr.
//
// b3 = 1 means that n is frozen: kept to the last bit, and stored with its bias correction applied.
#pragma once

#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define STILLHOUSE_INLINE __host__ __device__ __forceinline__
#else
#define STILLHOUSE_INLINE inline __attribute__((always_inline))
#endif

namespace stillhouse {

// Hyper-parameters of one parameter group. The logarithms are taken by the host in double.
struct AdanGroup {
  double lr, beta1, beta2, beta3, eps, weight_decay;
  double log_beta1, log_beta2, log_beta3;
  const float* lr_tensor;  // overrides `lr` when not null; lives where the kernel runs
  int32_t no_prox;
  int32_t maximize;
};

// What is the same for all elements of one tensor in one step.
struct AdanScalars {
  float beta1, beta2, beta3;
  float take1, take2, take3;  // 1 - beta
  float m_factor, v_factor;   // 1 / (1 - b1^t) and b2 / (1 - b2^t)
  float n_factor;             // 1 / sqrt(1 - b3^t)
  float eps, shrink, rate;
  float gradient_scale;
};

struct AdanElement {
  float theta, m, v, n, g_prev;
};

// 1 - beta^t without cancellation; `log_beta` is -inf for beta = 0.
STILLHOUSE_INLINE double bias_correction(double log_beta, double t) {
  return -expm1(t * log_beta);
}

// What the stored gradient is multiplied by: 1 / loss scale, then clipping to `max_norm` of the global
// norm of the unscaled gradient. A norm that is NaN gives NaN, so the damage is never silent.
STILLHOUSE_INLINE float gradient_factor(const float* grad_scale, const float* grad_norm, double max_norm) {
  double factor = grad_scale != nullptr ? 1.0 / static_cast<double>(*grad_scale) : 1.0;
  if (grad_norm != nullptr) {
    const double ratio = max_norm / (fabs(factor) * static_cast<double>(*grad_norm) + 1e-6);
    factor *= ratio > 1.0 ? 1.0 : ratio;
  }
  return static_cast<float>(factor);
}

// The scalars of step `t` (1-based), in double until the last moment.
STILLHOUSE_INLINE AdanScalars adan_scalars(const AdanGroup& group, double t, float factor) {
  const double lr = group.lr_tensor != nullptr ? static_cast<double>(*group.lr_tensor) : group.lr;
  const double decay = lr * group.weight_decay;
  const double shrink = group.no_prox ? 1.0 - decay : 1.0 / (1.0 + decay);
  AdanScalars s;
  s.beta1 = static_cast<float>(group.beta1);
  s.beta2 = static_cast<float>(group.beta2);
  s.beta3 = static_cast<float>(group.beta3);
  s.take1 = static_cast<float>(1.0 - group.beta1);
  s.take2 = static_cast<float>(1.0 - group.beta2);
  s.take3 = static_cast<float>(1.0 - group.beta3);
  s.m_factor = static_cast<float>(1.0 / bias_correction(group.log_beta1, t));
  s.v_factor = static_cast<float>(group.beta2 / bias_correction(group.log_beta2, t));
  s.n_factor = group.beta3 == 1.0 ? 1.0f : static_cast<float>(1.0 / sqrt(bias_correction(group.log_beta3, t)));
  s.eps = static_cast<float>(group.eps);
  s.shrink = static_cast<float>(shrink);
  s.rate = static_cast<float>(group.no_prox ? lr : lr * shrink);
  s.gradient_scale = group.maximize ? -factor : factor;
  return s;
}

// `first` says that there is no previous gradient yet; g_prev is then not used.
STILLHOUSE_INLINE void adan_update(AdanElement& e, float gradient, const AdanScalars& s, bool first) {
  const float g = s.gradient_scale * gradient;
  const float d = first ? 0.0f : g - e.g_prev;
  e.m = s.beta1 * e.m + s.take1 * g;
  e.v = s.beta2 * e.v + s.take2 * d;
  const float look_ahead = g + s.beta2 * d;
  e.n = s.beta3 * e.n + s.take3 * (look_ahead * look_ahead);
  const float denominator = sqrtf(e.n) * s.n_factor + s.eps;
  const float u = (e.m * s.m_factor + e.v * s.v_factor) / denominator;
  e.theta = s.shrink * e.theta - s.rate * u;
  e.g_prev = g;
}

}  // namespace stillhouse
