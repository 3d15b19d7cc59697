// scenarios.h: the list of scenarios of a model, and its main function.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "model/checker/checker.h"

namespace jax_ring::model {

struct NamedScenario {
  std::string name;
  Options options;
  std::function<void()> scenario;
};

// Explores the scenarios with argv[1] in their names, or all of them, and prints a line for each. Stops at the first
// failure. Returns the status of the process.
int run_scenarios(const std::vector<NamedScenario>& scenarios, int argc, char** argv);

}  // namespace jax_ring::model
