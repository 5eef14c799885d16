#include "examples/hosts.h"

#include "examples/rank_rows.h"

#include <ATen/Functions.h>
#include <unistd.h>

#include <array>
#include <functional>
#include <set>
#include <string_view>

namespace examples {

Hosts hosts_of(const fsdp::DeviceMesh& mesh) {
  std::array<char, 256> name = {};
  gethostname(name.data(), name.size() - 1);
  const auto mine = static_cast<int64_t>(std::hash<std::string_view>()(name.data()));
  const auto all = rows_of_ranks(at::tensor({mine}, at::kLong), mesh);
  std::set<int64_t> different;
  Hosts hosts{.ranks_here = 0};
  for (int64_t rank = 0; rank < all.size(0); ++rank) {
    const auto host = all[rank][0].item<int64_t>();
    different.insert(host);
    if (host == mine) ++hosts.ranks_here;
  }
  hosts.count = static_cast<int64_t>(different.size());
  return hosts;
}

}  // namespace examples
