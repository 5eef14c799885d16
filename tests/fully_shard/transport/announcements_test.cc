// What the runtime tells a transport besides what it sends: that shards are about to be
// written, and that a backward is over.
#include "fully_shard/fully_shard.h"
#include "fully_shard/transport/c10d_transport.h"
#include "tests/support/start_values.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <utility>

namespace fsdp::testing {
namespace {

struct Told {
  int64_t shard_writes = 0, backward_ends = 0;
};

// Of this rank.
Told& told() {
  thread_local Told counts;
  return counts;
}

// The usual transport, which counts what it is told.
class ToldTransport final : public internal::Transport {
 public:
  explicit ToldTransport(std::unique_ptr<internal::Transport> usual) : usual_(std::move(usual)) {}

  int64_t shard_rank() const override { return usual_->shard_rank(); }
  int64_t shard_count() const override { return usual_->shard_count(); }
  at::Tensor shard_memory(int64_t bytes, c10::Device device) override {
    return usual_->shard_memory(bytes, device);
  }
  at::Tensor row_memory(int64_t row_bytes, c10::Device device) override {
    return usual_->row_memory(row_bytes, device);
  }
  std::unique_ptr<internal::Gather> gather(const at::Tensor& shards,
                                           const internal::Issue& issue) override {
    return usual_->gather(shards, issue);
  }
  std::unique_ptr<internal::PendingReduction> reduce(at::Tensor rows, at::ScalarType dtype,
                                                     const internal::Issue& issue) override {
    return usual_->reduce(std::move(rows), dtype, issue);
  }
  std::unique_ptr<internal::PendingReduction> all_reduce(at::Tensor row,
                                                         const internal::Issue& issue) override {
    return usual_->all_reduce(std::move(row), issue);
  }
  void before_shard_write() override { ++told().shard_writes; }
  void end_of_backward() override { ++told().backward_ends; }
  bool checks_stamps() const override { return usual_->checks_stamps(); }
  bool reads_flags() const override { return usual_->reads_flags(); }

 private:
  std::unique_ptr<internal::Transport> usual_;
};

class TransportIsTold : public Worlds {
 protected:
  void SetUp() override {
    internal::set_transport_factory([](const DeviceMesh& mesh, int64_t dim) {
      return std::make_unique<ToldTransport>(internal::make_c10d_transport(mesh, dim));
    });
  }
  void TearDown() override { internal::set_transport_factory({}); }
};

torch::nn::Linear sharded_square(const DeviceMesh& mesh) {
  auto layer = make_linear(4, 4);
  fully_shard(layer, mesh);
  return layer;
}

TEST_P(TransportIsTold, OfAWriteToAnEntry) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto layer = sharded_square(mesh);
    torch::NoGradGuard no_grad;
    told() = {};
    layer->parameters()[0].fill_(0.5);
    EXPECT_EQ(told().shard_writes, 1);
  });
}

TEST_P(TransportIsTold, OfAWriteToAMemberWhenItGoesToTheShards) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto layer = sharded_square(mesh);
    torch::NoGradGuard no_grad;
    told() = {};
    layer->weight.fill_(0.5);
    EXPECT_EQ(told().shard_writes, 0);
    get_fsdp_module(*layer).reshard();
    EXPECT_EQ(told().shard_writes, 1);
  });
}

TEST_P(TransportIsTold, OfAWriteToAMemberThatIsReadThroughTheEntry) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto layer = sharded_square(mesh);
    torch::NoGradGuard no_grad;
    layer->weight.fill_(0.5);
    told() = {};
    EXPECT_EQ((layer->parameters()[0] * 2).numel(), 16);
    EXPECT_EQ(told().shard_writes, 1);
  });
}

TEST_P(TransportIsTold, OfTheEndOfABackwardOnceHoweverManyUnits) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto first = sharded_square(mesh), second = sharded_square(mesh);
    told() = {};
    for (int64_t step = 1; step <= 3; ++step) {
      second(first(torch::ones({1, 4}))).sum().backward();
      EXPECT_EQ(told().backward_ends, step);
    }
    EXPECT_EQ(told().shard_writes, 0);
  });
}

INSTANTIATE_WORLDS(TransportIsTold, 2, 3);

}  // namespace
}  // namespace fsdp::testing
