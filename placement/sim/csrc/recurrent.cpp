// The cells' formulas. Registered for autograd's key too, so that no backward formula is needed.
#include "recurrent.h"

#include "device.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/chunk.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <tuple>

namespace sim {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

Tensor with_bias(const Tensor& gates, const MaybeTensor& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

// Returns the hidden state, the cell state, and an empty workspace: autograd keeps what it needs.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates,
    const Tensor& hidden_gates,
    const Tensor& cell,
    const MaybeTensor& input_bias,
    const MaybeTensor& hidden_bias) {
  const auto gates = with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias);
  const auto parts = gates.chunk(4, /*dim=*/1); // input, forget, cell, output
  const auto new_cell = parts[1].sigmoid() * cell + parts[0].sigmoid() * parts[2].tanh();
  return {parts[3].sigmoid() * new_cell.tanh(), new_cell, at::empty_like(cell)};
}

// Returns the hidden state and an empty workspace.
std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates,
    const Tensor& hidden_gates,
    const Tensor& hidden,
    const MaybeTensor& input_bias,
    const MaybeTensor& hidden_bias) {
  const auto input = with_bias(input_gates, input_bias).chunk(3, /*dim=*/1);
  const auto recurrent = with_bias(hidden_gates, hidden_bias).chunk(3, /*dim=*/1);
  const auto reset = (input[0] + recurrent[0]).sigmoid();
  const auto update = (input[1] + recurrent[1]).sigmoid();
  const auto candidate = (input[2] + reset * recurrent[2]).tanh();
  return {candidate + update * (hidden - candidate), at::empty_like(hidden)};
}

} // namespace

void register_recurrent_cells() {
  for (const auto key : {kDispatchKey, c10::DispatchKey::AutogradPrivateUse1}) {
    auto* library = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    library->impl("_thnn_fused_lstm_cell", &lstm_cell);
    library->impl("_thnn_fused_gru_cell", &gru_cell);
  }
}

} // namespace sim
