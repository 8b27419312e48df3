// Tier 0: c10/core/ScalarType.h, Layout.h. Names of tensor types in Python's pickles.
#pragma once

#include <c10/core/Layout.h>
#include <c10/core/ScalarType.h>

#include <optional>
#include <string>
#include <string_view>

namespace ddpkit::train {

/// Returns "FloatStorage"; empty for newer types, which torch.save writes as untyped storages.
std::string_view storage_name_of(c10::ScalarType dtype);
std::optional<c10::ScalarType> dtype_of_storage(std::string_view name);

/// Returns "float32", as in torch.float32; empty for types that torch.save does not write.
std::string_view name_of(c10::ScalarType dtype);
std::optional<c10::ScalarType> dtype_of_name(std::string_view name);

/// Returns "torch.sparse_coo"; empty for layouts that torch.save does not write.
std::string_view layout_name(c10::Layout layout);
std::optional<c10::Layout> layout_of_name(std::string_view name);

}  // namespace ddpkit::train
