// Every test here runs with the checks of unannounced writes.
#include "fully_shard/raw_access.h"

namespace fsdp {
namespace {

[[maybe_unused]] const bool kChecked = (set_write_checks(true), true);

}  // namespace
}  // namespace fsdp
