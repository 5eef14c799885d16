// Embeddings whose rows are cut: numbers of one device, and gradients of a rank's own
// rows.
#include "dtensor/dtensor.h"
#include "tests/support/worlds.h"
#include "tests/tensor_parallel/beside_one_device.h"

#include <ATen/record_function.h>

namespace fsdp::testing {
namespace {

using torch::nn::Embedding;
using torch::nn::EmbeddingOptions;

// A padding row; rows that several indices have.
EmbeddingOptions options_of(int64_t rows, bool by_frequency) {
  return EmbeddingOptions(rows, 4).padding_idx(1).scale_grad_by_freq(by_frequency);
}

at::Tensor indices_below(int64_t rows) {
  return torch::tensor({0, 1, 3, 3, 1, 3}, torch::kLong).remainder(rows).view({2, 3});
}

struct EmbeddingPair {
  EmbeddingPair(const EmbeddingOptions& options, const DeviceMesh& mesh, const ParallelPlan& plan)
      : plain(drawn(1, [&] { return Embedding(options); })),
        parallel(drawn(1, [&] { return Embedding(options); })) {
    parallelize_module(parallel, mesh, plan);
  }

  Embedding plain, parallel;
};

class TensorParallelRowLookup : public Worlds {
 protected:
  void with_pairs(const std::function<void(EmbeddingPair&, const at::Tensor& indices)>& body) {
    for (const int64_t rows : {7, 2}) {
      for (const bool by_frequency : {false, true}) {
        for (const ParallelPlan& plan :
             {ParallelPlan{{"", RowwiseParallel{}}}, ParallelPlan{{"", RowwiseParallel{Shard{1}}}},
              ParallelPlan{{"weight", ShardParameter{Shard{0}}}}}) {
          on_ranks([&](int64_t, const DeviceMesh& mesh) {
            EmbeddingPair pair(options_of(rows, by_frequency), mesh, plan);
            body(pair, indices_below(rows));
          });
        }
      }
    }
  }
};

at::Tensor loss_of(Embedding& embedding, const at::Tensor& indices) {
  const at::Tensor rows = embedding->forward(indices);
  return rows.mul(rows).mul(torch::arange(24, torch::kFloat64).view({2, 3, 4}).cos()).sum();
}

TEST_P(TensorParallelRowLookup, EqualsOneDevice) {
  with_pairs([](EmbeddingPair& pair, const at::Tensor& indices) {
    for (int step = 0; step < 2; ++step) {
      const at::Tensor wanted = loss_of(pair.plain, indices),
                       found = loss_of(pair.parallel, indices);
      EXPECT_LE(distance(full_tensor(found.detach()), wanted.detach()), kClose);
      wanted.backward();
      found.backward();
      expect_same_gradients(*pair.parallel, *pair.plain, kClose);
    }
  });
}

TEST_P(TensorParallelRowLookup, HasSecondDerivatives) {
  with_pairs([](EmbeddingPair& pair, const at::Tensor& indices) {
    const auto second = [&](Embedding& embedding) {
      const auto first = torch::autograd::grad({loss_of(embedding, indices)}, {embedding->weight},
                                               /*grad_outputs=*/{}, /*retain_graph=*/true,
                                               /*create_graph=*/true);
      first[0].mul(first[0]).sum().backward();
    };
    second(pair.plain);
    second(pair.parallel);
    expect_same_gradients(*pair.parallel, *pair.plain, kClose);
  });
}

// The rows for which this thread's backwards add up gradients.
std::vector<int64_t>& added_up() {
  thread_local std::vector<int64_t> rows;
  return rows;
}

std::unique_ptr<at::ObserverContext> note_rows(const at::RecordFunction& function) {
  if (std::string(function.name()) == "aten::embedding_dense_backward")
    added_up().push_back(function.inputs()[2].toInt());
  return nullptr;
}

// One row more than it has stands for all others.
TEST(TensorParallelRows, MakeGradientsOfItsOwnRows) {
  on_ranks_of(3, [](int64_t, const DeviceMesh& mesh) {
    auto embedding = drawn(1, [] { return Embedding(EmbeddingOptions(300, 4)); });
    parallelize_module(embedding, mesh, {{"", RowwiseParallel{}}});
    added_up().clear();
    const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(&note_rows)
                                                       .needsInputs(true)
                                                       .scopes({at::RecordScope::FUNCTION}));
    loss_of(embedding, indices_below(300)).backward();
    at::removeCallback(handle);
    EXPECT_EQ(added_up(), std::vector<int64_t>{101});
  });
}

INSTANTIATE_WORLDS(TensorParallelRowLookup, 1, 2, 3, 4);

}  // namespace
}  // namespace fsdp::testing
