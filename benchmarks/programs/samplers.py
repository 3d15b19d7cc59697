"""Samplers of numpyro and blackjax: the data divided, or the chains."""

import jax
import jax.numpy as jnp
import numpy as np

from programs.registry import program, put


@program("numpyro", data=8)
def numpyro_nuts(mesh):
    """NUTS for a hierarchical regression: each evaluation of its tree sums over the divided data."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import MCMC, NUTS

    rng = np.random.default_rng(0)
    x = rng.normal(size=(128, 3)).astype(np.float32)
    group = rng.integers(0, 4, 128)
    y = (x.sum(1) + group + rng.normal(size=128)).astype(np.float32)
    x, group, y = put((x, group, y), mesh, "data")

    def model(x, group, y):
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        with numpyro.plate("groups", 4):
            offset = numpyro.sample("offset", dist.Normal(0, 2))
        w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        numpyro.sample("y", dist.Normal(x @ w + offset[group], scale), obs=y)

    mcmc = MCMC(NUTS(model, max_tree_depth=4), num_warmup=10, num_samples=10, progress_bar=False)

    def calculate():
        mcmc.run(jax.random.key(0), x, group, y, extra_fields=("potential_energy", "num_steps"))
        return mcmc.get_samples(), mcmc.get_extra_fields()

    return calculate


@program("blackjax", data=8)
def blackjax_smc(mesh):
    """Tempered sequential Monte Carlo with divided particles: weights and resampling need those of all devices."""
    import blackjax
    from blackjax.smc import resampling

    start = put(np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32) * 2, mesh, "data")
    step_size = {"step_size": 0.2, "inverse_mass_matrix": jnp.eye(2), "num_integration_steps": 3}
    smc = blackjax.adaptive_tempered_smc(
        lambda x: -0.5 * (x**2).sum() / 4, lambda x: -0.5 * ((x[0] ** 2 + x[1] - 1) ** 2 + x[1] ** 2),
        blackjax.hmc.build_kernel(), blackjax.hmc.init,
        blackjax.smc.extend_params(step_size), resampling.systematic, 0.5, num_mcmc_steps=2,
    )  # fmt: skip

    def calculate():
        step, state, info = jax.jit(smc.step), smc.init(start), []
        for i in range(3):
            state, each = step(jax.random.key(i), state)
            info.append(each.log_likelihood_increment)
        return state, info

    return calculate


@program("blackjax", chains=8)
def blackjax_chees(mesh):
    """Adaptation of HMC by ChEES over divided chains, whose statistics are those of all chains in each step."""
    import blackjax
    import optax

    start = put(np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32), mesh, "chains")
    scales = jnp.array([0.5, 1.0, 2.0])

    def log_density(x):
        return -0.5 * ((x / scales) ** 2).sum()

    @jax.jit
    def adapt(key, start):
        warmup = blackjax.chees_adaptation(log_density, num_chains=32)
        (states, parameters), _ = warmup.run(key, start, 0.1, optax.adam(0.05), 15)
        return states, parameters["step_size"], parameters["inverse_mass_matrix"]

    return lambda: adapt(jax.random.key(0), start)
