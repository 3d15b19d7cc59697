"""What a program communicates: as written, as compiled, in bytes on the wire, and as recorded while it runs."""

from jax_ring.inspect.compiled import Instruction as Instruction
from jax_ring.inspect.explanation import Collective as Collective
from jax_ring.inspect.explanation import Explanation as Explanation
from jax_ring.inspect.explanation import explain as explain
from jax_ring.inspect.flight_recorder import FlightRecord as FlightRecord
from jax_ring.inspect.flight_recorder import RecordedCall as RecordedCall
from jax_ring.inspect.flight_recorder import flight_recorder as flight_recorder
from jax_ring.inspect.statistics import CallStatistics as CallStatistics
from jax_ring.inspect.statistics import Late as Late
from jax_ring.inspect.statistics import Statistics as Statistics
from jax_ring.inspect.statistics import statistics as statistics
