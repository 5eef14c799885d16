#include "tests/fully_shard/support/bit_equality.h"

#include "on_demand/on_demand_storage.h"
#include "tests/support/full_value.h"
#include "tests/support/thread_ranks.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cctype>
#include <limits>

namespace fsdp::testing {
namespace {

Tensors values(const Tensors& tensors) {
  torch::NoGradGuard no_grad;
  Tensors copies;
  for (const auto& tensor : tensors)
    copies.push_back(tensor.defined() ? tensor.detach().clone() : tensor);
  return copies;
}

// The mean of `world` equal gradients: exact for one and two ranks, two roundings for
// three.
void expect_mean(const torch::Tensor& gradient, const torch::Tensor& expected, int64_t world,
                 const std::string& label) {
  ASSERT_EQ(gradient.defined(), expected.defined()) << label;
  if (!gradient.defined()) return;
  const auto mean = full_value(gradient);
  if (world <= 2) {
    EXPECT_TRUE(same_bits(mean, expected.contiguous())) << label;
  } else {
    const double epsilon =
        expected.scalar_type() == torch::kBFloat16 ? 0x1p-7 : std::numeric_limits<float>::epsilon();
    EXPECT_TRUE(torch::allclose(mean, expected, 4 * epsilon, /*atol=*/0)) << label;
  }
}

void run_case(const Case& c, int64_t world) {
  Random random, same_random;
  const auto plain = std::make_shared<Cells>(c.parameters(random));
  const auto sharded = std::make_shared<Cells>(c.parameters(same_random));
  sharded->shard(init_device_mesh(torch::kCPU, {world}));
  const auto expected = values(c.program(plain->members(), random));
  const auto actual = values(c.program(sharded->members(), same_random));
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(same_bits(actual[i], expected[i])) << "result " << i;
  }
  for (size_t i = 0; i < plain->cells.size(); ++i) {
    const auto label = "cell" + std::to_string(i) + ".weight";
    const auto entry = sharded->entries()[i];
    expect_mean(entry.grad(), plain->members()[i].grad(), world, "gradient of " + label);
    EXPECT_TRUE(same_bits(full_value(entry), plain->members()[i].detach())) << label;
    EXPECT_TRUE(same_bits(sharded->members()[i].detach().clone(), plain->members()[i].detach()))
        << label;
  }
}

void run_refusal(const Refusal& refusal, int64_t world) {
  Random random;
  const auto initial = refusal.parameters(random);
  const auto sharded = std::make_shared<Cells>(values(initial));
  sharded->shard(init_device_mesh(torch::kCPU, {world}));
  try {
    refusal.program(sharded->members(), random);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const c10::Error& error) {
    for (const auto& text : refusal.texts) {
      EXPECT_THAT(error.what_without_backtrace(), ::testing::HasSubstr(text));
    }
  }
  for (size_t i = 0; i < initial.size(); ++i) {
    const auto member = sharded->members()[i];
    EXPECT_TRUE(same_bits(member.detach().clone(), initial[i])) << "member " << i;
    EXPECT_TRUE(same_bits(full_value(sharded->entries()[i]), initial[i])) << "registry entry " << i;
  }
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }
std::ostream& operator<<(std::ostream& out, const Refusal& refusal) { return out << refusal.name; }

std::function<Tensors(Random&)> shapes(std::vector<std::vector<int64_t>> all) {
  return [all](Random& random) {
    Tensors tensors;
    for (const auto& shape : all) tensors.push_back(random(shape));
    return tensors;
  };
}

std::string test_name(const std::string& case_name) {
  std::string name;
  bool upper = true;
  for (const char c : case_name) {
    const bool letter = std::isalnum(static_cast<unsigned char>(c)) != 0;
    if (letter) name += upper ? static_cast<char>(std::toupper(static_cast<unsigned char>(c))) : c;
    upper = !letter;
  }
  return name;
}

Cells::Cell::Cell(const torch::Tensor& parameter)
    : weight(register_parameter(
          "weight", parameter,
          at::isFloatingType(parameter.scalar_type()) || parameter.is_complex())) {}

Cells::Cells(const Tensors& parameters) {
  for (const auto& parameter : parameters) {
    cells.push_back(
        register_module("cell" + std::to_string(cells.size()), std::make_shared<Cell>(parameter)));
  }
}

void Cells::shard(const DeviceMesh& mesh) {
  for (auto& cell : cells) fully_shard(cell, mesh);
  fully_shard(*this, mesh);
}

Tensors Cells::members() const {
  Tensors members;
  for (const auto& cell : cells) members.push_back(cell->weight);
  return members;
}

::testing::AssertionResult same_bits(const torch::Tensor& actual, const torch::Tensor& expected) {
  if (actual.defined() != expected.defined())
    return ::testing::AssertionFailure() << "one is undefined";
  if (!actual.defined()) return ::testing::AssertionSuccess();
  if (actual.scalar_type() != expected.scalar_type() || actual.sizes() != expected.sizes() ||
      actual.strides() != expected.strides()) {
    return ::testing::AssertionFailure()
           << actual.toString() << actual.sizes() << actual.strides() << " instead of "
           << expected.toString() << expected.sizes() << expected.strides();
  }
  const auto a = actual.resolve_conj().resolve_neg().contiguous();
  const auto b = expected.resolve_conj().resolve_neg().contiguous();
  const auto* bytes = static_cast<const char*>(a.const_data_ptr());
  if (std::equal(bytes, bytes + a.nbytes(), static_cast<const char*>(b.const_data_ptr()))) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << a << "\ninstead of\n" << b;
}

void expect_bit_equal(const Case& c, int64_t world) {
  EvictAfterEveryOperator evict;
  run_ranks(world, [&](int64_t) { run_case(c, world); });
}

void expect_refused(const Refusal& refusal, int64_t world) {
  EvictAfterEveryOperator evict;
  run_ranks(world, [&](int64_t) { run_refusal(refusal, world); });
}

EvictAfterEveryOperator::EvictAfterEveryOperator() {
  internal::set_evict_after_every_operator(true);
}
EvictAfterEveryOperator::~EvictAfterEveryOperator() {
  internal::set_evict_after_every_operator(false);
}

}  // namespace fsdp::testing
