// Words that the ranks of one mesh dimension tell each other on the host, through the
// Gloo beside the backend of their devices, where no collective is announced: see
// fully_shard/host_exchange.h.
//
//   if (auto* const exchange = transport.host_exchange())
//     const auto words = exchange->run({late, used_bits});   // words[2]: of rank 2
//
// First of all they compare what they have issued: only ranks that issued the same can
// make sense of each other's words.
#pragma once

#include "device_mesh/collectives/collectives.h"

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::internal {

class HostExchange {
 public:
  using Words = std::vector<uint64_t>;

  // Of the dimension whose gathers and reductions those are, on devices. REQUIRES: the
  // group of `reductions` has Gloo.
  HostExchange(Collectives gathers, Collectives reductions);

  // Every rank's words, by rank in the dimension; each may have another number of them.
  // Throws an error on all ranks alike, that names the first operation in which they
  // part, where they have not issued the same gathers and reductions; then nothing more
  // can be issued. Blocks the host until every rank is here. Collective over the
  // dimension.
  std::vector<Words> run(const Words& words);

 private:
  std::vector<Words> exchange(const Words& words);
  void check_order(const std::vector<std::string>& texts);
  std::string first_difference();

  Collectives gathers_, reductions_;
  Collectives host_;  // the same ranks' host memory
};

}  // namespace fsdp::internal
