// Every message of a step of Muon fails once on every rank: the ranks say which exchange
// it was, soon, but those to which all had come that they need, and a new start is clean.
// A delay changes nothing.
#include "device_mesh/process_group.h"
#include "dtensor/dtensor.h"
#include "optim/muon.h"
#include "tests/support/faulty_backend.h"
#include "tests/support/full_value.h"
#include "tests/support/number_from_environment.h"
#include "tests/support/placed_values.h"
#include "tests/support/with_environment.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/torch.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fsdp {
namespace {

using std::chrono::seconds;
using testing::Fault;
using testing::full_value;
using ::testing::HasSubstr;
using testing::on_ranks_of;
using testing::values_of;

constexpr auto kFaultTimeout = std::chrono::milliseconds(700);

// Two matrices in rows, too large to travel with notices.
struct MuonInRows {
  explicit MuonInRows(const DeviceMesh& mesh) {
    for (int64_t i = 0; i < 2; ++i) {
      const auto place = [&](double seed) {
        return distribute_tensor(values_of({96, 64}, seed), mesh, {Shard{0}});
      };
      params.push_back(torch::Tensor(place(static_cast<double>(i))).requires_grad_(true));
      params.back().mutable_grad() = place(10.0 + static_cast<double>(i));
    }
    muon = std::make_unique<Muon>(params, MuonOptions(2e-2));
  }
  std::vector<torch::Tensor> params;
  std::unique_ptr<Muon> muon;
};

std::vector<torch::Tensor> values_after_a_step() {
  std::vector<torch::Tensor> values;
  on_ranks_of(1, [&](int64_t, const DeviceMesh& mesh) {
    MuonInRows training(mesh);
    training.muon->step();
    for (const auto& param : training.params) values.push_back(full_value(param.detach()));
  });
  return values;
}

void expect_own_parts(const MuonInRows& training, const std::vector<torch::Tensor>& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    const DTensor param(training.params[i].detach());
    const auto& mesh = param.device_mesh();
    const auto own = expected[i].chunk(mesh.size(), 0)[static_cast<size_t>(mesh.local_rank())];
    EXPECT_TRUE(torch::equal(param.to_local(), own)) << "matrix " << i;
  }
}

class MuonFaults : public testing::Worlds {
 private:
  const testing::WithEnvironment over_gloo_{"FSDP_PEER_MEMORY", "off"};
};

TEST_P(MuonFaults, AFailureAtAnyMessageIsNamedWhereItIsFelt) {
  int64_t messages = 0;
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    const auto none = std::make_shared<Fault>();
    MuonInRows training(mesh);
    testing::inject_fault(mesh.group(0), none, kFaultTimeout);
    training.muon->step();
    if (rank == 0) messages = none->issued;
  });
  ASSERT_GE(messages, 2);  // there and back
  const auto expected = values_after_a_step();
  for (int64_t at = 0; at < messages; ++at) {
    for (int64_t faulty = 0; faulty < world(); ++faulty) {
      if (!testing::is_night() && faulty != at % world()) continue;  // of one rank each
      on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
        const auto kind = rank == faulty ? Fault::Kind::kError : Fault::Kind::kNone;
        MuonInRows training(mesh);
        testing::inject_fault(mesh.group(0), std::make_shared<Fault>(Fault{.kind = kind, .at = at}),
                              kFaultTimeout);
        const auto begin = std::chrono::steady_clock::now();
        std::string message;
        try {
          training.muon->step();
        } catch (const std::exception& error) {
          message = error.what();
        }
        SCOPED_TRACE("rank " + std::to_string(rank) + ", message " + std::to_string(at) +
                     " of rank " + std::to_string(faulty));
        if (message.empty() && rank != faulty) {
          expect_own_parts(training, expected);
        } else {
          EXPECT_THAT(message, HasSubstr("owners"));
        }
        EXPECT_LE(std::chrono::steady_clock::now() - begin, kFaultTimeout + seconds(5));
      });
    }
  }
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    MuonInRows training(mesh);
    training.muon->step();
    expect_own_parts(training, expected);
  });
}

TEST_P(MuonFaults, ADelayAtAnyMessageChangesNoBit) {
  const auto expected = values_after_a_step();
  for (int64_t at = 0; at < 8; ++at) {
    on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
      const auto kind = rank == world() - 1 ? Fault::Kind::kDelay : Fault::Kind::kNone;
      MuonInRows training(mesh);
      testing::inject_fault(mesh.group(0), std::make_shared<Fault>(Fault{.kind = kind, .at = at}),
                            seconds(20));
      training.muon->step();
      expect_own_parts(training, expected);
    });
  }
}

INSTANTIATE_WORLDS(MuonFaults, 2, 3);

}  // namespace
}  // namespace fsdp
