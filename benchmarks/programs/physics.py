"""Simulations: flows, spectral methods, molecular dynamics and differential equations."""

import jax
import jax.numpy as jnp
import numpy as np

from programs.registry import program, put


@program("jax-cfd", x=4, y=2)
def jax_cfd_flow(mesh):
    """Navier-Stokes by finite volumes with a conjugate-gradient pressure solve, on a grid divided both ways."""
    import jax_cfd.base as cfd

    grid = cfd.grids.Grid((32, 32), domain=((0, 2 * np.pi), (0, 2 * np.pi)))
    v = cfd.initial_conditions.filtered_velocity_field(jax.random.key(0), grid, 2.0, 3)
    v = put(v, mesh, "x", "y")
    step = cfd.equations.semi_implicit_navier_stokes(
        density=1.0, viscosity=1e-2, dt=1e-2, grid=grid, pressure_solve=cfd.pressure.solve_cg
    )
    run = jax.jit(cfd.funcutils.repeated(step, 4))
    return lambda: [u.data for u in run(v)]


@program("jax-cfd", x=8)
def jax_cfd_spectral(mesh):
    """Navier-Stokes in two dimensions by FFTs, of a vorticity that is divided."""
    import jax_cfd.base as cfd
    from jax_cfd import spectral

    grid = cfd.grids.Grid((32, 32), domain=((0, 2 * np.pi), (0, 2 * np.pi)))
    equation = spectral.equations.ForcedNavierStokes2D(1e-2, grid, smooth=True)
    step = spectral.time_stepping.crank_nicolson_rk4(equation, 1e-2)
    vorticity = put(np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32), mesh, "x")
    run = jax.jit(lambda w: jnp.fft.irfftn(cfd.funcutils.repeated(step, 4)(jnp.fft.rfftn(w))))
    return lambda: run(vorticity)


@program("exponax", x=8)
def exponax_kuramoto(mesh):
    """The Kuramoto-Sivashinsky equation by exponential time differencing, its field divided in space."""
    import exponax as ex

    stepper = ex.stepper.KuramotoSivashinsky(1, 60.0, 128, 0.1)
    start = ex.ic.RandomTruncatedFourierSeries(1, cutoff=5)(128, key=jax.random.key(0))
    run = jax.jit(ex.rollout(stepper, 5))
    start = put(start, mesh, None, "x")
    return lambda: run(start)


@program("dinosaur", z=2, x=2, y=2)
def dinosaur_primitive(mesh):
    """An atmosphere's dynamics by spherical harmonics, divided by levels and both ways by its own constraints."""
    from dinosaur import (
        coordinate_systems,
        primitive_equations,
        primitive_equations_states,
        scales,
        sigma_coordinates,
        spherical_harmonic,
        time_integration,
    )

    units = primitive_equations.PrimitiveEquationsSpecs.from_si()
    grid = spherical_harmonic.Grid.T21(
        spherical_harmonics_impl=spherical_harmonic.FastSphericalHarmonics, radius=units.radius
    )
    coords = coordinate_systems.CoordinateSystem(
        grid, sigma_coordinates.SigmaCoordinates.equidistant(8), spmd_mesh=mesh
    )
    make, aux = primitive_equations_states.isothermal_rest_atmosphere(
        coords, units, p0=1e5 * scales.units.pascal, p1=5e3 * scales.units.pascal
    )
    reference = aux[primitive_equations_states.xarray_utils.REF_TEMP_KEY]
    orography = primitive_equations.truncated_modal_orography(
        aux[primitive_equations_states.xarray_utils.OROGRAPHY], coords
    )
    equation = primitive_equations.PrimitiveEquations(reference, orography, coords, units)
    step = time_integration.imex_rk_sil3(equation, units.nondimensionalize(600 * scales.units.s))
    run = jax.jit(time_integration.repeated(step, 3))
    state = make(jax.random.key(0))
    return lambda: run(state)


@program("jax-md", particles=8)
def jax_md_nvt(mesh):
    """Lennard-Jones particles with a Nose-Hoover thermostat, all pairs, particles divided."""
    from jax_md import energy, simulate, space

    displacement, shift = space.periodic(6.0)
    init, apply = simulate.nvt_nose_hoover(energy.lennard_jones_pair(displacement), shift, 1e-3, kT=0.5)
    corners = np.stack(np.meshgrid(*[np.arange(4) * 1.5] * 3), -1).reshape(-1, 3).astype(np.float32)
    where = put(corners, mesh, "particles")

    def calculate():
        state = init(jax.random.key(0), where)
        return jax.lax.fori_loop(0, 10, lambda i, state: apply(state), state)

    return calculate


@program("diffrax", batch=8)
def diffrax_neural_ode(mesh):
    """A neural ODE trained through an adaptive solver; the batch shares the step size, so each step sums over it."""
    import diffrax
    import equinox as eqx
    import optax

    start = put(np.random.default_rng(0).normal(size=(32, 2)).astype(np.float32), mesh, "batch")
    field = eqx.nn.MLP(2, 2, 16, 2, activation=jnp.tanh, key=jax.random.key(0))
    tx = optax.adam(1e-2)
    state = tx.init(eqx.filter(field, eqx.is_array))

    def solve(field, start):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, field: jax.vmap(field)(y)), diffrax.Tsit5(), 0.0, 1.0, 0.1, start, field,
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-4), max_steps=64,
        )  # fmt: skip
        return solution.ys[-1], solution.stats["num_steps"]

    @eqx.filter_jit
    def step(field, state, start):
        def loss(field):
            end, steps = solve(field, start)
            return jnp.mean((end - start[:, ::-1]) ** 2), steps

        (value, steps), grads = eqx.filter_value_and_grad(loss, has_aux=True)(field)
        updates, state = tx.update(grads, state)
        return value, steps, eqx.apply_updates(field, updates), state

    def calculate():
        now, of_tx, seen = field, state, []
        for _ in range(2):
            value, steps, now, of_tx = step(now, of_tx, start)
            seen.append((value, steps))
        return seen, eqx.filter(now, eqx.is_array)

    return calculate
