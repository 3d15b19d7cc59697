"""Optimizers, transport, Gaussian processes and evolution."""

import jax
import jax.numpy as jnp
import numpy as np

from programs.registry import program, put


def rows(mesh, *shape: int) -> jax.Array:
    return put(np.random.default_rng(0).normal(size=shape).astype(np.float32), mesh, "data")


@program("jaxopt", data=8)
def jaxopt_proximal(mesh):
    """FISTA with backtracking for the lasso, and its derivative by the implicit function theorem."""
    import jaxopt

    x = rows(mesh, 128, 16)
    y = x[:, 0] - 2 * x[:, 3]

    def distance(penalty, x, y):
        solver = jaxopt.ProximalGradient(jaxopt.objective.least_squares, jaxopt.prox.prox_lasso, maxiter=20)
        w = solver.run(jnp.zeros(16), hyperparams_prox=penalty, data=(x, y)).params
        return ((x @ w - y) ** 2).mean(), w

    return lambda: jax.jit(jax.value_and_grad(distance, has_aux=True))(0.1, x, y)


@program("optimistix", data=8)
def optimistix_levenberg(mesh):
    """Levenberg-Marquardt (lineax inside) for a nonlinear fit to divided data."""
    import optimistix as optx

    x = rows(mesh, 128)
    y = jnp.sin(1.3 * x) * 0.7 + 0.1

    def residuals(w, data):
        x, y = data
        return w[0] * jnp.sin(w[1] * x) + w[2] - y

    def fit(x, y):
        solver = optx.LevenbergMarquardt(rtol=1e-5, atol=1e-5)
        solution = optx.least_squares(residuals, solver, jnp.ones(3), (x, y), max_steps=20, throw=False)
        return solution.value, solution.stats["num_steps"]

    return lambda: jax.jit(fit)(x, y)


@program("ott-jax", data=8)
def ott_sinkhorn(mesh):
    """Optimal transport between divided clouds of points by Sinkhorn's iterations, and its gradient."""
    from ott.geometry import pointcloud
    from ott.solvers import linear

    x, y = rows(mesh, 64, 3), rows(mesh, 48, 3) + 0.5

    def cost(x, y):
        out = linear.solve(pointcloud.PointCloud(x, y, epsilon=0.1), max_iterations=50)
        return out.reg_ot_cost, (out.f, out.g, out.n_iters)

    return lambda: jax.jit(jax.value_and_grad(cost, has_aux=True))(x, y)


@program("tinygp", data=4)
def tinygp_fit(mesh):
    """A Gaussian process: the gradient of its likelihood through a Cholesky factorization of divided rows."""
    import tinygp

    x = rows(mesh, 64)
    y = jnp.sin(x)

    def loss(w, x, y):
        kernel = jnp.exp(w[0]) * tinygp.kernels.Matern32(jnp.exp(w[1]))
        return -tinygp.GaussianProcess(kernel, x, diag=jnp.exp(w[2])).log_probability(y)

    return lambda: jax.jit(jax.value_and_grad(loss))(jnp.array([0.0, 0.0, -2.0]), x, y)


@program("evosax", data=8)
def evosax_cma(mesh):
    """CMA-ES, whose population is evaluated on all devices and ranked together."""
    from evosax.algorithms import CMA_ES

    strategy = CMA_ES(population_size=32, solution=jnp.zeros(6))
    on = jax.sharding.NamedSharding(mesh, jax.P("data"))

    @jax.jit
    def run(key):
        params = strategy.default_params
        state = strategy.init(key, jnp.ones(6), params)

        def step(state, key):
            ask, tell = jax.random.split(key)
            population, state = strategy.ask(ask, state, params)
            population = jax.lax.with_sharding_constraint(population, on)
            fitness = ((population - jnp.arange(6)) ** 2).sum(1)
            state, _ = strategy.tell(tell, population, fitness, state, params)
            return state, fitness.min()

        return jax.lax.scan(step, state, jax.random.split(key, 5))

    return lambda: run(jax.random.key(0))
