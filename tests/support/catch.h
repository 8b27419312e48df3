// Supports Catch2 of Debian 12 (2.13) and Ubuntu 24.04 (3), and adds functions that both lack.
#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;
using Catch::Matchers::ContainsSubstring;
#else
#include <catch2/catch.hpp>
inline auto ContainsSubstring(const std::string& text) { return Catch::Matchers::Contains(text); }
#endif

#include <iostream>

/// Ends the test as skipped (CTest reads the line) and prints the reason.
#define DDPKIT_SKIP(reason)                             \
  do {                                                  \
    std::cout << "[skipped] " << (reason) << std::endl; \
    return;                                             \
  } while (false)
