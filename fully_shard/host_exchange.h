// What the ranks of a device mesh tell each other on the host at the end of each
// backward.
//
// On the CPU every collective is announced, and reduced gradients carry flags. On devices
// the host could read neither without waiting for the device. So the ranks exchange a
// few words over Gloo instead, once per backward that reduces gradients, after all that
// it issues and before gradients are published. What they tell is which collectives each
// has issued (ranks that part get an error that names both operations, where the backend
// alone would hang); which start values, and which writes to parameters, they had; which
// parameters they used (one that no rank used has no .grad); and whether gradients came
// after their reduction had left.
//
// The host waits for the other ranks' hosts there, about a tenth of a millisecond on one
// machine, and never for the device.
#pragma once

#include "device_mesh/api.h"

namespace fsdp {

// On by default; nothing is exchanged on the CPU, nor over backends that have no Gloo
// beside them. While it is off, parameters that no rank used have zeros as gradients, and
// ranks that differ are not told. Process-wide; call it alike on every rank, while no
// backward runs. Local.
FSDP_API void set_host_exchange(bool on);
[[nodiscard]] FSDP_API bool host_exchange();

}  // namespace fsdp
