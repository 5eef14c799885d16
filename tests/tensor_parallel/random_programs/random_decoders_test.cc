// Decoders at random, dense and with experts, whose batches are cut over "cp", heads over
// "tp" and experts over "ep", sharded over all that is left, against one device.
// FSDP_DECODERS and FSDP_FIRST_SEED in the environment choose how many and which.
#include "dtensor/context_parallel.h"
#include "programs/trainer/model/transformer.h"
#include "programs/trainer/setup/sharded_model.h"
#include "tests/support/number_from_environment.h"
#include "tests/support/thread_ranks.h"
#include "tests/tensor_parallel/beside_one_device.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

namespace programs {
namespace {

using fsdp::testing::drawn_from_seed;

constexpr uint64_t kShare = 60, kAll = 300;
constexpr int64_t kMostRanks = 8, kRows = 2;
constexpr double kBound = 1e-12;

struct Decoder {
  uint64_t seed;
  TrainingOptions options;  // the model, and how it is sharded
  int64_t dp;
  int64_t blocks_of_sequence;  // Shard::outer
  fsdp::SequenceAttention how;
  bool has_documents;
  int64_t window;  // tokens that a row attends to; 0: all before

  int64_t ranks() const { return options.replicas * dp * options.ep * options.cp * options.tp; }
};

std::string to_string(const Decoder& of) {
  const TransformerConfig& model = of.options.model;
  std::ostringstream text;
  text << "seed " << of.seed << ": replicas " << of.options.replicas << ", dp " << of.dp << ", ep "
       << of.options.ep << ", cp " << of.options.cp << ", tp " << of.options.tp
       << (of.options.sequence_parallel ? " with the sequence cut" : "") << "; " << model.heads
       << " heads of " << model.kv_heads << ", " << of.options.tokens << " tokens in "
       << of.blocks_of_sequence << " blocks, attention " << static_cast<int>(of.how)
       << (of.has_documents ? ", documents" : "") << ", window " << of.window << ", "
       << model.mixture.experts << " experts";
  return text.str();
}

class Draw {
 public:
  explicit Draw(uint64_t seed) : random_(seed) {}
  int64_t from(int64_t least, int64_t most) {
    return least + static_cast<int64_t>(random_() % static_cast<uint64_t>(most - least + 1));
  }
  bool one_in(int64_t n) { return from(1, n) == 1; }

 private:
  std::mt19937_64 random_;
};

std::vector<int64_t> divisors(int64_t of) {
  std::vector<int64_t> found;
  for (int64_t i = 1; i <= of; ++i)
    if (of % i == 0) found.push_back(i);
  return found;
}

TransformerConfig draw_model(Draw& draw, int64_t tokens) {
  const int64_t kv_heads = draw.from(1, 7);
  const int64_t heads = kv_heads * draw.from(1, 7 / kv_heads);
  TransformerConfig model{.vocab = 19,
                          .width = draw.from(1, 3) * 4,
                          .blocks = draw.from(1, 2),
                          .heads = heads,
                          .kv_heads = kv_heads,
                          .max_tokens = tokens,
                          .head_width = 2 * draw.from(1, 3),
                          .mlp_width = draw.from(3, 9),
                          .qkv_bias = draw.one_in(3),
                          .qk_norm = draw.one_in(3),
                          .tied_head = draw.one_in(3)};
  if (draw.one_in(3)) {
    model.mixture.experts = draw.from(1, 6);
    model.mixture.per_token = draw.from(1, std::min<int64_t>(2, model.mixture.experts));
    model.mixture.sums_to_one = draw.one_in(2);
  }
  return model;
}

Decoder draw_decoder(uint64_t seed) {
  Draw draw(seed);
  Decoder of{.seed = seed, .options = {}, .dp = 1};
  TrainingOptions& options = of.options;
  options.batch = kRows;
  options.tokens = draw.from(2, 13);
  options.model = draw_model(draw, options.tokens);
  const bool has_experts = options.model.mixture.experts > 0;
  int64_t left = kMostRanks;
  const auto part = [&](int64_t most) {
    const int64_t size = draw.from(1, std::min(most, left));
    left /= size;
    return size;
  };
  options.cp = part(4);
  options.tp = has_experts && options.cp > 1 ? 1 : part(3);
  options.ep = has_experts ? part(4) : 1;
  options.replicas = draw.one_in(4) ? part(2) : 1;
  of.dp = part(2);
  options.sequence_parallel = options.tp > 1 && (has_experts || draw.one_in(2));
  options.units = draw.one_in(3) ? Units::kRoot : Units::kBlocks;
  const auto blocks = divisors(options.tokens);
  of.blocks_of_sequence =
      blocks[static_cast<size_t>(draw.from(0, static_cast<int64_t>(blocks.size()) - 1))];
  of.how = static_cast<fsdp::SequenceAttention>(draw.from(0, 3));
  of.has_documents = draw.one_in(3);
  of.window = draw.one_in(3) ? draw.from(1, options.tokens) : 0;
  return of;
}

struct Text {
  torch::Tensor inputs, targets, begins;  // of all ranks: [ranks with batches, rows, tokens]
};

Text draw_text(const Decoder& of) {
  return drawn_from_seed(of.seed, [&] {
    const std::vector<int64_t> shape = {of.options.replicas * of.dp * of.options.ep, kRows,
                                        of.options.tokens};
    const int64_t vocab = of.options.model.vocab;
    return Text{torch::randint(vocab, shape), torch::randint(vocab, shape),
                torch::rand(shape).lt(0.3)};
  });
}

std::optional<Documents> documents(const Decoder& of, torch::Tensor begins) {
  if (!of.has_documents && of.window == 0) return std::nullopt;
  if (!of.has_documents) begins = torch::zeros_like(begins);
  Documents all = documents_of(begins);
  if (of.window > 0) all.mask = all.mask & torch::ones_like(all.mask).triu(1 - of.window);
  return all;
}

torch::Tensor loss(Transformer& model, const Decoder& of, const torch::Tensor& inputs,
                   const torch::Tensor& targets, const torch::Tensor& begins) {
  const auto logits = model->forward(inputs, documents(of, begins));
  return torch::cross_entropy_loss(logits.flatten(0, 1), targets.flatten());
}

Transformer make(const Decoder& of) {
  return fsdp::testing::drawn(of.seed, [&] { return Transformer(of.options.model); });
}

double largest(const torch::Tensor& tensor) { return tensor.abs().max().item<double>(); }

// Beside rounding: some gradients are sums of what cancels, such as those of a router
// that chooses one expert, whose weight is then 1.
void expect_same_gradients(torch::nn::Module& sharded, const torch::nn::Module& plain) {
  double most = 0;
  for (const auto& parameter : plain.parameters()) most = std::max(most, largest(parameter.grad()));
  const auto wanted = plain.named_parameters();
  for (const auto& item : sharded.named_parameters()) {
    const torch::Tensor found = fsdp::testing::full_gradient(item.value());
    const torch::Tensor& expected = wanted[item.key()].grad();
    ASSERT_EQ(found.sizes(), expected.sizes()) << item.key();
    EXPECT_LE(largest(found - expected), kBound * std::max(largest(expected), 1e-2 * most))
        << item.key();
  }
}

void check_rank(const Decoder& of) {
  const auto mesh = mesh_of(of.options, of.ranks());
  Transformer plain = make(of);
  auto sharded = shard_model(make(of), of.options, mesh);
  const Text text = draw_text(of);
  const auto expected = loss(plain, of, text.inputs.flatten(0, 1), text.targets.flatten(0, 1),
                             text.begins.flatten(0, 1));
  expected.backward();
  const auto place = mesh.rank() / of.options.tp / of.options.cp;
  const auto cut = [&](const torch::Tensor& tokens) -> torch::Tensor {
    if (of.options.cp == 1) return tokens;
    return fsdp::distribute_tensor(tokens, mesh["cp"],
                                   {fsdp::Shard{.dim = 1, .outer = of.blocks_of_sequence}});
  };
  loss(sharded.model, of, cut(text.inputs[place]), cut(text.targets[place]), text.begins[place])
      .backward();
  expect_same_gradients(*sharded.model, *plain);
}

TEST(RandomDecoders, HaveTheNumbersOfOneDevice) {
  const auto first = fsdp::testing::number_from_environment("FSDP_FIRST_SEED", 1);
  const auto count = fsdp::testing::number_of_cases("FSDP_DECODERS", kShare, kAll);
  for (uint64_t seed = first; seed < first + count && !HasFailure(); ++seed) {
    const Decoder of = draw_decoder(seed);
    SCOPED_TRACE(to_string(of));
    fsdp::set_sequence_attention(of.how);
    try {
      fsdp::testing::run_ranks(of.ranks(), [&](int64_t) {
        SCOPED_TRACE(to_string(of));
        check_rank(of);
      });
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
  }
  fsdp::set_sequence_attention(fsdp::SequenceAttention::kCheapest);
}

}  // namespace
}  // namespace programs
