// ragged_test.cc: the ragged all-to-all within a process and between processes, and refused tables.
#include "attributes/ragged.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/engine.h"
#include "tests/support/processes.h"
#include "tests/support/support.h"
#include "tests/support/workers.h"

namespace jax_ring::cpu::testing {
namespace {

constexpr unsigned char kBefore = 0xa5;  // in every byte of the results before the call

// The numbers exchanged by a group's ranks.
template <class Number>
struct Numbers {
  int num_ranks;
  size_t num_slices;
  std::vector<Number> all;  // by rank, then row, then slice

  Numbers(int num_ranks, size_t num_slices)
      : num_ranks(num_ranks), num_slices(num_slices), all(4 * num_ranks * num_slices, 0) {}
  Number& at(int rank, int row, size_t slice) { return all[(4 * rank + row) * num_slices + slice]; }
  RaggedTable table() const { return {all.data(), std::is_same_v<Number, int64_t>, num_ranks, num_slices}; }
};

// Random slices, some empty, without overlap in any result. Slices of an operand may overlap.
template <class Number>
Numbers<Number> random_numbers(int num_ranks, size_t each, size_t rows, unsigned seed) {
  std::minstd_rand random(seed);
  Numbers<Number> numbers(num_ranks, num_ranks * each);
  for (int receiver = 0; receiver < num_ranks; ++receiver) {
    // In a random order, with gaps between them.
    std::vector<size_t> places(num_ranks * each);
    std::iota(places.begin(), places.end(), size_t{0});
    std::shuffle(places.begin(), places.end(), random);
    size_t next = 0;
    for (size_t place : places) {
      const int source = static_cast<int>(place / each);
      const size_t sent = receiver * each + place % each, expected = source * each + place % each;
      const size_t gap = random() % 2, most = 2 * rows / places.size() + 1;
      const size_t size = random() % 4 == 0 || next + gap >= rows ? 0 : std::min(random() % most, rows - next - gap);
      next += size > 0 ? gap : 0;
      numbers.at(source, 0, sent) = static_cast<Number>(random() % (rows - size + 1));
      numbers.at(source, 1, sent) = static_cast<Number>(size);
      // Empty slices have no place.
      numbers.at(source, 2, sent) = static_cast<Number>(size == 0 ? rows + 1000 : next);
      numbers.at(receiver, 3, expected) = static_cast<Number>(size);
      next += size;
    }
  }
  return numbers;
}

// The definition: the result of a rank, row by row.
template <class Number>
Bytes expected(Numbers<Number> numbers, size_t row_bytes, const std::vector<Bytes>& operands, size_t result_bytes,
               int rank) {
  Bytes want(result_bytes, kBefore);
  const size_t each = numbers.num_slices / numbers.num_ranks;
  for (int source = 0; source < numbers.num_ranks; ++source) {
    for (size_t i = rank * each; i < (rank + 1) * each; ++i) {
      for (Number row = 0; row < numbers.at(source, 1, i); ++row) {
        for (size_t byte = 0; byte < row_bytes; ++byte) {
          want[(numbers.at(source, 2, i) + row) * row_bytes + byte] =
              operands[source][(numbers.at(source, 0, i) + row) * row_bytes + byte];
        }
      }
    }
  }
  return want;
}

// A ragged all-to-all of operands of `bytes` bytes.
Message message_of(std::vector<Part> slices, size_t bytes) {
  Message message{DType::u8, {bytes}, {Collective::ragged_all_to_all}};
  message.slices = std::make_shared<const std::vector<Part>>(std::move(slices));
  message.plan.slices = message.slices->data();
  message.plan.num_slices = static_cast<int>(message.slices->size());
  return message;
}

template <class Number>
void expect_moved(int num_ranks, size_t each, size_t rows, size_t result_rows, size_t row_bytes, unsigned seed) {
  SCOPED_TRACE(std::to_string(num_ranks) + " ranks, " + std::to_string(each) + " slices for each, " +
               std::to_string(rows) + " rows of " + std::to_string(row_bytes) + " bytes");
  const auto numbers = random_numbers<Number>(num_ranks, each, std::min(rows, result_rows), seed);
  const std::vector<Bytes> operands = random_elements(DType::u8, num_ranks, rows * row_bytes, seed);
  std::vector<OffsetBuffer> inputs, outputs;
  for (const Bytes& operand : operands) {
    inputs.emplace_back(operand, 0);
    outputs.emplace_back(Bytes(result_rows * row_bytes, kBefore), 0);
  }
  std::vector<Outcome> outcomes(num_ranks);
  RendezvousPtr rendezvous(new Rendezvous);
  rendezvous->num_arrived = num_ranks;
  for (int i = 0; i < 2 * num_ranks; ++i) rendezvous->inputs.push_back(inputs[i % num_ranks].data());
  for (OffsetBuffer& output : outputs) rendezvous->outputs.push_back(output.data());
  for (const Outcome& of_rank : outcomes) rendezvous->done.push_back(of_rank.completion());
  {
    Threads workers;
    // The message ends before the work is done.
    run_collective(std::move(rendezvous),
                   message_of(slices_of(numbers.table(), row_bytes, rows, result_rows), rows * row_bytes), workers);
    for (const Outcome& of_rank : outcomes) ASSERT_TRUE(of_rank.wait());
  }
  for (int rank = 0; rank < num_ranks; ++rank) {
    ASSERT_EQ(outcomes[rank].error(), "");
    const Bytes want = expected(numbers, row_bytes, operands, outputs[rank].size(), rank);
    ASSERT_FALSE(first_difference(DType::u8, outputs[rank].data(), want.data(), want.size())) << "rank " << rank;
  }
}

TEST(Ragged, MovesSlicesAndLeavesTheRest) {
  unsigned seed = 0;
  for (int num_ranks : {1, 2, 3, 4, 8}) {
    for (size_t each : {1, 3}) {
      for (size_t rows : {0, 1, 7, 100}) {
        for (size_t row_bytes : {1, 4, 24}) {
          ASSERT_NO_FATAL_FAILURE(expect_moved<int32_t>(num_ranks, each, rows, rows, row_bytes, ++seed));
          ASSERT_NO_FATAL_FAILURE(expect_moved<int64_t>(num_ranks, each, rows, 2 * rows + 3, row_bytes, ++seed));
          ASSERT_NO_FATAL_FAILURE(expect_moved<int32_t>(num_ranks, each, 2 * rows, rows, row_bytes, ++seed));
        }
      }
    }
  }
}

TEST(Ragged, RowsWithoutElements) {
  auto numbers = random_numbers<int32_t>(3, 2, 10, 1);
  EXPECT_TRUE(slices_of(numbers.table(), 0, 10, 10).empty());
  ASSERT_NO_FATAL_FAILURE(expect_moved<int32_t>(3, 2, 10, 10, 0, 1));
}

// Enough for several threads, and more than the caches hold.
TEST(Ragged, LargeMessages) { ASSERT_NO_FATAL_FAILURE(expect_moved<int32_t>(4, 3, 40'009, 40'009, 64, 1)); }

// Two ranks, each with one row for itself and two for the other.
Numbers<int32_t> small_numbers() {
  Numbers<int32_t> numbers(2, 2);
  for (int rank : {0, 1}) {
    for (int other : {0, 1}) {
      const int size = rank == other ? 1 : 2;
      numbers.at(rank, 0, other) = other;
      numbers.at(rank, 1, other) = size;
      numbers.at(rank, 2, other) = 2 * rank;
      numbers.at(other, 3, rank) = size;
    }
  }
  return numbers;
}

std::string refusal(const Numbers<int32_t>& numbers, size_t rows = 4, size_t result_rows = 4) {
  try {
    slices_of(numbers.table(), 4, rows, result_rows);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

struct Fault {
  int rank, row;
  size_t slice;
  int32_t value;
  std::string expected;
};

TEST(Ragged, RefusesWhatIsNotWithinItsBuffersOrNotExpected) {
  ASSERT_EQ(refusal(small_numbers()), "");
  const std::vector<Fault> faults = {
      {1, 0, 0, 3, "slice 0 of rank 1, 2 rows from row 3 on, is not within its operand of 4 rows"},
      {1, 0, 0, -1, "slice 0 of rank 1, 2 rows from row -1 on, is not within its operand of 4 rows"},
      {0, 0, 1, 2'147'483'647, "slice 1 of rank 0, 2 rows from row 2147483647 on, is not within its operand of 4 rows"},
      {1, 2, 0, 3,
       "slice 0 of rank 1, 2 rows from row 3 on in the result of rank 0, is not within that: it has 4 rows"},
      {0, 2, 1, -4,
       "slice 1 of rank 0, 2 rows from row -4 on in the result of rank 1, is not within that: it has 4 rows"},
      {0, 1, 1, 5, "slice 1 of rank 0 has 5 rows, but rank 1 expects 2 in its slice 0"},
      {0, 1, 1, -2, "slice 1 of rank 0 has the size -2, and sizes are not negative"},
      {0, 3, 1, 0, "slice 0 of rank 1 has 2 rows, but rank 0 expects 0 in its slice 1"},
  };
  for (const Fault& fault : faults) {
    Numbers<int32_t> numbers = small_numbers();
    numbers.at(fault.rank, fault.row, fault.slice) = fault.value;
    EXPECT_EQ(refusal(numbers), fault.expected);
  }
  EXPECT_EQ(refusal(small_numbers(), 2),
            "slice 1 of rank 0, 2 rows from row 1 on, is not within its operand of 2 rows");
  EXPECT_EQ(refusal(small_numbers(), 4, 3),
            "slice 0 of rank 1, 2 rows from row 2 on in the result of rank 0, is not within that: it has 3 rows");
}

// Both sides agree on a size larger than every buffer.
TEST(Ragged, RefusesSizesBeyondAnyBuffer) {
  constexpr int64_t kMost = INT64_MAX;
  Numbers<int64_t> numbers(1, 1);
  numbers.at(0, 0, 0) = kMost;
  numbers.at(0, 1, 0) = numbers.at(0, 3, 0) = kMost;
  EXPECT_THROW(slices_of(numbers.table(), 8, 100, 100), std::invalid_argument);
  numbers.at(0, 0, 0) = 0;
  EXPECT_THROW(slices_of(numbers.table(), 8, 100, 100), std::invalid_argument);
}

TEST(Ragged, BetweenProcesses) {
  using namespace shm;
  unsigned seed = 0;
  const std::vector<std::vector<int64_t>> layouts = {{0, 1}, {0, 0, 1}, {0, 1, 0, 1}, {0, 0, 0, 1, 2, 2}};
  for (const auto& layout : layouts) {
    for (const Capacities& capacities : {kSmall, kGrowing}) {
      Processes processes(layout, capacities, 0xfffffff0u);
      const int p = processes.num_ranks();
      for (size_t each : {1, 4}) {
        for (size_t rows : {1, 50, 3000}) {
          constexpr size_t kRowBytes = 12;
          const auto numbers = random_numbers<int32_t>(p, each, rows, ++seed);
          GroupCall call(message_of(slices_of(numbers.table(), kRowBytes, rows, rows), rows * kRowBytes), p, false,
                         seed % 2 == 0, seed, [&](const std::vector<Bytes>& operands, size_t bytes, int rank) {
                           return expected(numbers, kRowBytes, operands, bytes, rank);
                         });
          on_all(processes.count(), [&](int process) { call.submit(processes[process]); });
          ASSERT_NO_FATAL_FAILURE(call.expect_results());
        }
      }
    }
  }
}

// All data goes from one rank to one other: the pieces differ in size as much as possible.
TEST(Ragged, OneSliceBetweenProcesses) {
  using namespace shm;
  constexpr size_t kRows = 20'000;
  Processes processes({0, 1, 2});
  Numbers<int32_t> numbers(3, 3);
  numbers.at(0, 1, 2) = numbers.at(2, 3, 0) = kRows;
  GroupCall call(message_of(slices_of(numbers.table(), 1, kRows, kRows), kRows), 3, false, false, 1,
                 [&](const std::vector<Bytes>& operands, size_t bytes, int rank) {
                   return expected(numbers, 1, operands, bytes, rank);
                 });
  on_all(3, [&](int process) { call.submit(processes[process]); });
  ASSERT_NO_FATAL_FAILURE(call.expect_results());
}

}  // namespace
}  // namespace jax_ring::cpu::testing
