"""What a program communicates: as written, as compiled, in bytes on the wire, and as recorded while it runs."""

from jax_ring.inspect.compiled import Instruction as Instruction
from jax_ring.inspect.explanation import Collective as Collective
from jax_ring.inspect.explanation import Explanation as Explanation
from jax_ring.inspect.explanation import explain as explain
from jax_ring.inspect.recorded import CallStatistics as CallStatistics
from jax_ring.inspect.recorded import FlightRecord as FlightRecord
from jax_ring.inspect.recorded import Late as Late
from jax_ring.inspect.recorded import RecordedCall as RecordedCall
from jax_ring.inspect.recorded import Statistics as Statistics
from jax_ring.inspect.recorded import flight_recorder as flight_recorder
from jax_ring.inspect.recorded import statistics as statistics
