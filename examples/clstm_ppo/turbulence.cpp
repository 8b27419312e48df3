#include "clstm_ppo/turbulence.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace clstm_ppo {
namespace {

using Matrix = std::vector<std::vector<double>>;

// In place: the lower triangle L of L L^T. `matrix` is symmetric and, due to its ridge, positive definite.
void factorise(Matrix& matrix) {
  for (std::size_t i = 0; i < matrix.size(); ++i) {
    for (std::size_t j = 0; j <= i; ++j) {
      double sum = matrix[i][j];
      for (std::size_t k = 0; k < j; ++k) sum -= matrix[i][k] * matrix[j][k];
      matrix[i][j] = i == j ? std::sqrt(sum) : sum / matrix[j][j];
    }
  }
}

// Returns x^T (L L^T)^-1 x, by solving L y = x.
double squared_length(const Matrix& lower, std::vector<double> x) {
  double result = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    for (std::size_t k = 0; k < i; ++k) x[i] -= lower[i][k] * x[k];
    x[i] /= lower[i][i];
    result += x[i] * x[i];
  }
  return result;
}

}  // namespace

std::vector<double> turbulence(const std::vector<std::vector<double>>& returns, int days) {
  std::vector<double> result(returns.size(), 0.0);
  const auto history = static_cast<std::size_t>(days);
  const std::size_t assets = returns.empty() ? 0 : returns.front().size();
  for (std::size_t day = history; day < returns.size(); ++day) {
    std::vector<double> mean(assets, 0.0);
    for (std::size_t past = day - history; past < day; ++past)
      for (std::size_t i = 0; i < assets; ++i) mean[i] += returns[past][i] / days;
    Matrix covariance(assets, std::vector<double>(assets, 0.0));
    for (std::size_t past = day - history; past < day; ++past)
      for (std::size_t i = 0; i < assets; ++i)
        for (std::size_t j = 0; j <= i; ++j)
          covariance[i][j] += (returns[past][i] - mean[i]) * (returns[past][j] - mean[j]) / (days - 1);
    // The covariance of assets that always move together, or never move, has no inverse. Increases the variance by a
    // negligible millionth.
    for (std::size_t i = 0; i < assets; ++i) covariance[i][i] += 1e-6 * covariance[i][i] + 1e-12;
    factorise(covariance);
    std::vector<double> distance(assets);
    for (std::size_t i = 0; i < assets; ++i) distance[i] = returns[day][i] - mean[i];
    result[day] = squared_length(covariance, std::move(distance));
  }
  return result;
}

}  // namespace clstm_ppo
