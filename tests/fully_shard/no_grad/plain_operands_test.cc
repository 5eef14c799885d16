// A rank's own plain tensors beside what is computed from registry entries where no
// gradients are recorded: each rank gets what the plain module gives it.
#include "dtensor/dtensor.h"
#include "tests/fully_shard/support/parity.h"
#include "tests/support/full_value.h"
#include "tests/support/worlds.h"

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

namespace functional = torch::nn::functional;
using torch::Tensor;
using Tensors = std::vector<Tensor>;

// One row is on rank 0 alone; five rows and seven are cut unevenly.
struct CutWeights : torch::nn::Module {
  CutWeights() {
    w = register_parameter("w", torch::randn({5, 16}) / 4);
    square = register_parameter("square", torch::randn({7, 7}));
    b = register_parameter("b", torch::randn({5}));
    row = register_parameter("row", torch::randn({1, 16}));
    table = register_parameter("table", torch::randn({10, 6}));
    kernel = register_parameter("kernel", torch::randn({5, 3, 3, 3}) / 4);
  }
  Tensor w, square, b, row, table, kernel;
};

// As they are registered: plain parameters, or entries.
struct P {
  explicit P(const torch::nn::Module& module) {
    const auto all = module.named_parameters();
    w = all["w"], square = all["square"], b = all["b"], row = all["row"];
    table = all["table"], kernel = all["kernel"];
  }
  Tensor w, square, b, row, table, kernel;
  Tensors all() const { return {w, square, b, row, table, kernel}; }
};

struct Expression {
  std::string name;
  std::function<Tensor(const P& p, const Data& mine)> value;
};
using Expressions = std::vector<Expression>;

Tensor rows(const Data& mine) { return mine.x[0]; }  // 8 x 16
Tensor seven(const Data& mine) { return rows(mine).slice(0, 0, 7).slice(1, 0, 7); }
Tensor own_number(const Data& mine) { return rows(mine).mean(); }

// Beside results of entries alone.
const Expressions& results_of_entries() {
  static const Expressions expressions{
      {"a loss and the squares of all",
       [](const P& p, const Data& mine) {
         auto loss = rows(mine).mm(p.w.t()).pow(2).mean();
         for (const auto& each : p.all()) loss = loss + 0.01 * each.pow(2).sum();
         return loss;
       }},
      {"linear, a product",
       [](const P& p, const Data& mine) {
         return functional::linear(rows(mine), p.w * 1, p.b + 0);
       }},
      {"a mean as a factor",
       [](const P& p, const Data& mine) { return rows(mine) * p.w.abs().mean(); }},
      {"an own number as a factor",
       [](const P& p, const Data& mine) { return p.w * own_number(mine); }},
      {"an own number as a factor of a view",
       [](const P& p, const Data& mine) { return own_number(mine) * p.w.t() * 2; }},
      {"an own number beside a sum",
       [](const P& p, const Data& mine) {
         return (p.w.sum() - own_number(mine)) / (own_number(mine) + p.b.pow(2).sum());
       }},
      {"a sum along the cut", [](const P& p, const Data& mine) { return rows(mine) + p.w.sum(0); }},
      {"statistics",
       [](const P& p, const Data& mine) {
         return (rows(mine) - p.w.mean()) / (p.w.std() + p.w.abs().max() + p.row.norm());
       }},
      {"a softmax of scores",
       [](const P& p, const Data& mine) {
         return (p.w * 2).softmax(0).t().unsqueeze(0) + rows(mine).unsqueeze(2);
       }},
      {"layer_norm",
       [](const P& p, const Data& mine) {
         return torch::layer_norm(rows(mine), {16}, p.row.view({16}) + 1, p.row.view({16}) * 2);
       }},
      {"batch_norm",
       [](const P& p, const Data& mine) {
         return torch::batch_norm(rows(mine).slice(1, 0, 5), p.b * 2, p.b + 1, {}, {}, true, 0.1,
                                  1e-5, false);
       }},
      {"conv2d",
       [](const P& p, const Data& mine) {
         return torch::conv2d(mine.image, p.kernel * 0.5, p.b + 1);
       }},
      {"embedding",
       [](const P& p, const Data& mine) { return torch::embedding(p.table * 2, mine.index); }},
      {"index_select",
       [](const P& p, const Data& mine) {
         return (p.table + 1).index_select(0, mine.index.flatten());
       }},
      {"an index of rows",
       [](const P& p, const Data& mine) { return (p.table + 1).index({mine.index}); }},
      {"gather",
       [](const P& p, const Data& mine) {
         return (p.square * 2).gather(0, seven(mine).argsort(int64_t{0}));
       }},
      {"einsum",
       [](const P& p, const Data& mine) {
         return torch::einsum("bi,oi->bo", {rows(mine), p.w * 3});
       }},
      {"where",
       [](const P& p, const Data& mine) {
         return torch::where(seven(mine) > 0, p.square * 2, seven(mine));
       }},
      {"where of what entries say",
       [](const P& p, const Data& mine) {
         return torch::where(p.square > 0, seven(mine), own_number(mine));
       }},
      {"masked_fill",
       [](const P& p, const Data& mine) {
         return seven(mine).masked_fill(p.square > 0, -1) +
                (p.square * 2).masked_fill(seven(mine) > 0, 3);
       }},
      {"lerp and addcmul",
       [](const P& p, const Data& mine) {
         return torch::lerp(p.square * 2, seven(mine), own_number(mine)) +
                torch::addcmul(seven(mine), p.square + 1, p.square, 2) +
                torch::lerp(seven(mine), p.square * 2, p.square.sigmoid());
       }},
      {"cat",
       [](const P& p, const Data& mine) {
         return torch::cat({rows(mine), p.w * 2, p.row + 1});
       }},
      {"stack of numbers",
       [](const P& p, const Data& mine) {
         return torch::stack({own_number(mine), p.w.sum(), p.b.norm()});
       }},
      {"a comparison",
       [](const P& p, const Data& mine) {
         return (p.square * 2 > seven(mine)).to(torch::kFloat) +
                torch::maximum(p.square.abs(), seven(mine)).clamp_min(own_number(mine));
       }},
      {"views of a result",
       [](const P& p, const Data& mine) {
         const auto twice = p.square * 2;
         return seven(mine) * twice[3] + twice.t()[1] + twice.slice(0, 1, 4).sum(0) +
                twice.view({-1}).slice(0, 2, 9) + twice.chunk(2)[1].sum(0);
       }},
      {"copies",
       [](const P& p, const Data& mine) {
         const auto copy = p.square.detach().clone();
         return seven(mine) + copy + p.square.clone().to(torch::kDouble) + copy.contiguous().t();
       }},
      {"an average",
       [](const P& p, const Data& mine) {
         const auto average = torch::zeros_like(p.w);
         average.lerp_(p.w, 0.25);
         return functional::linear(rows(mine), average);
       }},
      {"a copy of another shape's memory",
       [](const P& p, const Data& mine) {
         return seven(mine) + torch::empty_like(p.square).copy_(p.square) + (1 - p.square);
       }},
      {"zeros like an entry",
       [](const P& p, const Data& mine) { return seven(mine) + torch::zeros_like(p.square); }},
      {"quantiles",
       [](const P& p, const Data& mine) {
         return rows(mine) * p.w.quantile(0.25) + p.w.quantile(0.75, 0).sum();
       }},
      {"lists",
       [](const P& p, const Data& mine) {
         const auto scaled = at::_foreach_mul({p.square, p.b}, 2.0);
         const auto sums = at::_foreach_add(scaled, {seven(mine), rows(mine)[0].slice(0, 0, 5)});
         const auto factors = at::_foreach_mul(scaled, own_number(mine));
         return sums[0] + factors[0] + sums[1].sum() + factors[1].sum();
       }},
      {"in place on an own tensor",
       [](const P& p, const Data& mine) {
         auto own = seven(mine).clone();
         own.add_(p.square * 2, 0.5).mul_(p.square.abs().mean());
         own.addcmul_(p.square + 1, p.square);
         own[2].copy_(p.square[0] * 2);
         own.index_put_({torch::tensor({0, 1})}, p.square.slice(0, 0, 2) + 1);
         return own.masked_fill_(p.square > 1, 0);
       }},
      {"out",
       [](const P& p, const Data& mine) {
         auto out = torch::empty({7, 7}), product = torch::empty({8, 5});
         at::add_out(out, p.square * 2, p.square);
         at::mm_out(product, rows(mine), (p.w * 2).t());
         return out.sum() + product;
       }},
      {"a buffer's moving average",
       [](const P& p, const Data& mine) {
         auto buffer = seven(mine).clone();
         buffer.copy_(buffer * 0.9 + 0.1 * p.square);
         return buffer.copy_(p.square * 2) + buffer;
       }},
      {"autocast",
       [](const P& p, const Data& mine) {
         at::autocast::set_autocast_enabled(at::kCPU, true);
         const auto value = torch::linear(rows(mine), p.w * 2, p.b + 1).to(torch::kFloat);
         at::autocast::clear_cache();
         at::autocast::set_autocast_enabled(at::kCPU, false);
         return value;
       }},
  };
  return expressions;
}

// Which the cut does not allow.
const Expressions& views_of_entries() {
  static const Expressions expressions{
      {"select", [](const P& p, const Data& mine) { return rows(mine) * p.w[3]; }},
      {"chunks of a row",
       [](const P& p, const Data&) {
         const auto halves = p.w[0].chunk(2);
         return halves[0] * halves[1];
       }},
      {"slice", [](const P& p, const Data& mine) { return rows(mine).mm(p.w.slice(0, 1, 4).t()); }},
      {"chunk", [](const P& p, const Data& mine) { return rows(mine).mm(p.w.chunk(2)[1].t()); }},
      {"unbind", [](const P& p, const Data& mine) { return rows(mine) + p.w.unbind()[2]; }},
      {"reshape",
       [](const P& p, const Data& mine) {
         return rows(mine).mm(p.w.reshape({10, 8}).reshape({5, 16}).t()) + p.w.view({-1}).sum();
       }},
      {"reshape across rows",
       [](const P& p, const Data&) {
         return p.w.view({2, 40}).sum(1);
       }},
      {"flatten",
       [](const P& p, const Data& mine) {
         return torch::cat({p.w.flatten(), p.b, rows(mine).flatten()});
       }},
      {"as_strided",
       [](const P& p, const Data& mine) { return seven(mine) + p.square.as_strided({7}, {8}); }},
      {"a view of a view",
       [](const P& p, const Data& mine) { return rows(mine) + p.w.t().t()[1]; }},
      {"diagonal", [](const P& p, const Data& mine) { return seven(mine) * p.square.diagonal(); }},
  };
  return expressions;
}

// A plain module and a sharded one of the same values.
struct PlainAndSharded {
  explicit PlainAndSharded(const DeviceMesh& mesh, const FullyShardOptions& options = {}) {
    build_seeded([&] { return Model{plain = std::make_shared<CutWeights>(), {}}; });
    build_seeded([&] { return Model{sharded = std::make_shared<CutWeights>(), {}}; });
    fully_shard(*sharded, mesh, options);
  }
  std::shared_ptr<CutWeights> plain, sharded;
};

Data data_of(int64_t rank) { return make_data(3 + static_cast<uint64_t>(rank)); }

void expect_plain_values(const Expressions& expressions, const PlainAndSharded& pair,
                         const Data& mine) {
  for (const auto& expression : expressions) {
    SCOPED_TRACE(expression.name);
    const auto actual = full_value(expression.value(P(*pair.sharded), mine));
    const auto expected = expression.value(P(*pair.plain), mine);
    EXPECT_TRUE(torch::allclose(actual, expected, 1e-5, 1e-6)) << actual << expected;
  }
}

void expect_all_plain_values(const PlainAndSharded& pair, int64_t rank) {
  const auto mine = data_of(rank);
  expect_plain_values(results_of_entries(), pair, mine);
  expect_plain_values(views_of_entries(), pair, mine);
}

// Where no gradients are recorded.
void expect_in_evaluation(const DeviceMesh& mesh, const Expressions& expressions) {
  const PlainAndSharded pair(mesh);
  torch::NoGradGuard no_grad;
  expect_plain_values(expressions, pair, data_of(mesh.rank()));
}

class ImplicitReplicationOfEntries : public Worlds {};

TEST_P(ImplicitReplicationOfEntries, IsTheRanksOwnBesideWhatIsComputedFromThem) {
  on_ranks(
      [](int64_t, const DeviceMesh& mesh) { expect_in_evaluation(mesh, results_of_entries()); });
}

TEST_P(ImplicitReplicationOfEntries, IsTheRanksOwnInInferenceModeToo) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    const PlainAndSharded pair(mesh);
    c10::InferenceMode inference;
    expect_all_plain_values(pair, rank);
  });
}

TEST_P(ImplicitReplicationOfEntries, IsTheRanksOwnBesideViewsThatTheCutDoesNotAllow) {
  on_ranks([](int64_t, const DeviceMesh& mesh) { expect_in_evaluation(mesh, views_of_entries()); });
}

TEST_P(ImplicitReplicationOfEntries, IsTheRanksOwnBesideFrozenOnesInTraining) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    const PlainAndSharded pair(mesh);
    for (const auto& module : {pair.plain, pair.sharded})
      for (auto& parameter : module->parameters()) parameter.set_requires_grad(false);
    expect_all_plain_values(pair, rank);
  });
}

TEST_P(ImplicitReplicationOfEntries, IsTheRanksOwnWhereParametersAreCutElsewhere) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    const PlainAndSharded pair(
        mesh, {.shard_placement_fn = [](const std::string&, const Tensor& parameter) {
          return std::optional<Shard>(Shard{parameter.dim() - 1});
        }});
    torch::NoGradGuard no_grad;
    expect_all_plain_values(pair, rank);
  });
}

TEST_P(ImplicitReplicationOfEntries, IsTheRanksOwnBesideWhatTheyWereWrittenTo) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    const PlainAndSharded pair(mesh);
    const auto number = own_number(data_of(rank));
    const torch::NoGradGuard no_grad;
    const auto expected = pair.plain->w * number;
    const auto zeros = [&] { return distribute_tensor(torch::zeros({5, 16}), mesh, {Shard{0}}); };
    const auto entry = P(*pair.sharded).w;
    const auto sum = zeros().add_(entry), copy = zeros().copy_(entry);
    EXPECT_TRUE(full_value(sum * number).equal(expected));
    EXPECT_TRUE(full_value(copy * number).equal(expected));
  });
}

INSTANTIATE_WORLDS(ImplicitReplicationOfEntries, 1, 2, 3);

TEST(ImplicitReplicationOfEntriesOfReplicas, IsTheRanksOwn) {
  run_ranks(4, [](int64_t rank) {
    const PlainAndSharded pair(init_device_mesh(torch::kCPU, {2, 2}, {"replicate", "shard"}));
    torch::NoGradGuard no_grad;
    expect_all_plain_values(pair, rank);
  });
}

}  // namespace
}  // namespace fsdp::testing
