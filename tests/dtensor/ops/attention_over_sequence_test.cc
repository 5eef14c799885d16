// Attention of sequences that are cut (context parallelism), in each of the ways in which
// ranks can share it: values and gradients are those of plain tensors, and what is sent
// is what the way says.
#include "dtensor/context_parallel.h"
#include "dtensor/dtensor.h"
#include "dtensor/redistribute/comm_listener.h"
#include "tests/dtensor/compare_with_plain.h"
#include "tests/dtensor/random_placements.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/with_environment.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace fsdp {
namespace {

using enum SequenceAttention;
using testing::on_meshes;
using testing::waves;
using testing::whole;
using Placements = std::vector<Placement>;
using Tensors = std::vector<at::Tensor>;

class WithAttention {
 public:
  explicit WithAttention(SequenceAttention how) { set_sequence_attention(how); }
  ~WithAttention() { set_sequence_attention(kCheapest); }
  WithAttention(const WithAttention&) = delete;
};

struct Attention {
  std::string name;
  int64_t heads = 3, groups = 3, rows = 8;
  bool is_causal = true;
  std::optional<std::vector<int64_t>> mask = {};  // its shape
  int64_t keys = 0;                               // 0: as many as rows
  bool is_both = false;                           // causal and masked
  at::ScalarType dtype = at::kDouble;
};

Tensors inputs_of(const Attention& of) {
  const int64_t keys = of.keys == 0 ? of.rows : of.keys;
  Tensors inputs{waves({2, of.heads, of.rows, 8}), waves({2, of.groups, keys, 8}, 0.3),
                 waves({2, of.groups, keys, 8}, 0.2)};
  for (auto& input : inputs) input = input.to(of.dtype).set_requires_grad(true);
  return inputs;
}

std::optional<at::Tensor> mask_of(const Attention& of) {
  if (!of.mask.has_value()) return std::nullopt;
  // Every row sees its first key.
  auto mask = waves(*of.mask, 1.3).lt(0.2);
  mask.select(-1, 0).fill_(true);
  return mask;
}

at::Tensor attention(const Attention& of, const Tensors& inputs) {
  return at::scaled_dot_product_attention(inputs[0], inputs[1], inputs[2], mask_of(of), 0.0,
                                          of.is_both || (of.is_causal && !of.mask.has_value()),
                                          std::nullopt,
                                          /*enable_gqa=*/of.heads != of.groups);
}

Tensors value_and_gradients(const Attention& of, const Tensors& inputs) {
  const at::Tensor result = attention(of, inputs);
  const at::Tensor weights = waves(result.sizes().vec(), 0.37).to(of.dtype);
  whole(result).mul(weights).sum().backward();
  Tensors all{whole(result.detach())};
  for (const auto& input : inputs) all.push_back(whole(input.grad()));
  return all;
}

void expect_as_plain(const Attention& of, const DeviceMesh& mesh, const Placements& query,
                     const Placements& key) {
  const auto plain = inputs_of(of);
  const auto expected = value_and_gradients(of, plain);
  Tensors cut;
  for (size_t i = 0; i < plain.size(); ++i)
    cut.push_back(
        distribute_tensor(plain[i].detach(), mesh, i == 0 ? query : key).set_requires_grad(true));
  Tensors actual;
  try {
    actual = value_and_gradients(of, cut);
  } catch (const c10::Error& error) {
    ADD_FAILURE() << of.name << ", " << to_string(mesh) << " " << to_string(query[0]) << " "
                  << to_string(key[0]) << ": " << error.what();
    return;
  }
  const double tolerance = of.dtype == at::kDouble ? 1e-12 : 2e-2;
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_TRUE(actual[i].allclose(expected[i], tolerance, tolerance))
        << of.name << ", result " << i << ", " << to_string(mesh) << " "
        << (actual[i] - expected[i]).abs().max().item<double>();
}

std::vector<Attention> attentions() {
  return {{.name = "causal"},
          {.name = "whole", .is_causal = false},
          {.name = "uneven", .rows = 7},
          {.name = "short", .rows = 2},
          {.name = "grouped", .heads = 4, .groups = 2},
          {.name = "one group", .heads = 5, .groups = 1},
          {.name = "longer keys", .rows = 5, .is_causal = false, .keys = 9},
          {.name = "causal shorter keys", .rows = 9, .keys = 4},
          {.name = "mask of rows", .mask = {{8, 8}}},
          {.name = "mask of heads", .mask = {{2, 3, 8, 8}}},
          {.name = "mask of keys", .mask = {{2, 1, 1, 8}}},
          {.name = "causal mask", .mask = {{8, 8}}, .is_both = true},
          {.name = "causal mask of keys", .mask = {{2, 1, 1, 8}}, .is_both = true},
          {.name = "bf16", .dtype = at::kBFloat16}};
}

// How the sequence may be cut on a mesh; both have the queries' placements first.
std::vector<std::pair<Placements, Placements>> cuts_on(const DeviceMesh& mesh,
                                                       const Attention& of) {
  const bool in_blocks = of.rows % 4 == 0 && of.keys == 0;
  const Placement rows = Shard{2}, blocks = Shard{.dim = 2, .outer = in_blocks ? 4 : 1};
  if (mesh.ndim() == 1) {
    return {{{rows}, {rows}},
            {{blocks}, {blocks}},
            {{rows}, {Replicate{}}},
            {{Replicate{}}, {rows}},
            {{rows}, {blocks}}};
  }
  return {{{rows, Shard{1}}, {rows, Shard{1}}},
          {{Shard{0}, blocks}, {Shard{0}, blocks}},
          {{rows, rows}, {rows, rows}},
          {{Shard{1}, rows}, {Replicate{}, rows}},
          {{rows, Replicate{}}, {rows, Replicate{}}}};
}

class AttentionOverSequence : public ::testing::TestWithParam<SequenceAttention> {};

TEST_P(AttentionOverSequence, IsThatOfPlainTensors) {
  const WithAttention with(GetParam());
  for (const auto& of : attentions())
    on_meshes([&](const DeviceMesh& mesh) {
      for (const auto& [query, key] : cuts_on(mesh, of)) expect_as_plain(of, mesh, query, key);
    });
}

TEST(AttentionOfParts, GoesAroundOverGloo) {
  const WithAttention with(kRing);
  const testing::WithEnvironment transport("FSDP_PEER_MEMORY", "off");
  for (const int64_t rows : {8, 7, 2})
    on_meshes([&](const DeviceMesh& mesh) {
      if (mesh.ndim() == 1)
        expect_as_plain({.name = "", .rows = rows}, mesh, {Shard{2}}, {Shard{2}});
    });
}

std::string name_of(const ::testing::TestParamInfo<SequenceAttention>& info) {
  switch (info.param) {
    case kCheapest:
      return "Cheapest";
    case kHeads:
      return "Heads";
    case kGathered:
      return "Gathered";
    case kRing:
      return "Ring";
  }
  return "";
}
INSTANTIATE_TEST_SUITE_P(Ways, AttentionOverSequence,
                         ::testing::Values(kCheapest, kHeads, kGathered, kRing), name_of);

// What a rank of `mesh` gives to collectives of each kind in a forward and a backward:
// how many, and bytes.
struct Sent {
  int64_t count = 0, bytes = 0;
  bool operator==(const Sent&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Sent& sent) {
  return out << sent.count << " of " << sent.bytes << " bytes";
}
using SentByKind = std::map<std::string, Sent>;

SentByKind sent_by(const std::function<void()>& body) {
  SentByKind sent;
  const internal::CommListener listener([&sent](const internal::CommEvent& event) {
    auto& of = sent[internal::name_of(event.kind)];
    of.count += 1;
    of.bytes += event.bytes;
  });
  body();
  return sent;
}

// Eight bytes for each number: two rows of queries, keys, values or results have 2 * 3 *
// 2
// * 8 of them.
constexpr int64_t kPart = 2 * 3 * 2 * 8 * 8;

// Of three ranks, in a forward and in a backward.
void expect_sent(SequenceAttention how, const SentByKind& forward, const SentByKind& backward) {
  const WithAttention with(how);
  testing::run_ranks(3, [&](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {3});
    Tensors cut;
    for (const auto& plain : inputs_of({.name = "", .rows = 6}))
      cut.push_back(distribute_tensor(plain.detach(), mesh, {Shard{2}}).set_requires_grad(true));
    at::Tensor result;
    EXPECT_EQ(sent_by([&] { result = attention({.name = "", .rows = 6}, cut); }), forward);
    const at::Tensor gradient =
        distribute_tensor(at::ones(result.sizes(), at::kDouble), mesh, {Shard{2}});
    EXPECT_EQ(sent_by([&] { result.backward(gradient); }), backward);
  });
}

TEST(AttentionOfParts, SendsWhatItsWaySays) {
  expect_sent(kHeads, {{"all-to-all", {4, 4 * kPart}}}, {{"all-to-all", {4, 4 * kPart}}});
  expect_sent(kGathered, {{"all-gather", {2, 2 * kPart}}},
              {{"all-gather", {2, 2 * kPart}}, {"reduce-scatter", {2, 2 * 3 * kPart}}});
  expect_sent(kRing, {{"all-to-all", {2, 2 * 2 * kPart}}}, {{"all-to-all", {5, 5 * 2 * kPart}}});
}

}  // namespace
}  // namespace fsdp
