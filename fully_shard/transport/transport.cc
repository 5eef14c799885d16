#include "fully_shard/transport/transport.h"

#include "fully_shard/transport/c10d_transport.h"

#include <mutex>
#include <string>

namespace fsdp::internal {
namespace {

std::mutex factory_mutex;

TransportFactory& installed_factory() {
  static auto& factory = *new TransportFactory();
  return factory;
}

TransportFactory current_factory() {
  const std::lock_guard lock(factory_mutex);
  return installed_factory();
}

}  // namespace

std::string in_words(const Issue& issue) {
  const auto name = "unit '" + issue.unit_name + "'";
  if (issue.unit_name != kRootName) return name;
  return name + " (number " + std::to_string(issue.unit) + ")";
}

std::unique_ptr<Transport> make_transport(const DeviceMesh& mesh, int64_t dim) {
  const auto factory = current_factory();
  return factory ? factory(mesh, dim) : make_c10d_transport(mesh, dim);
}

void set_transport_factory(TransportFactory factory) {
  const std::lock_guard lock(factory_mutex);
  installed_factory() = std::move(factory);
}

}  // namespace fsdp::internal
