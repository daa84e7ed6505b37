"""Noise as a run lives with it: what has to be measured, decided or remembered between rollouts.

* ``measure``: KL, entropy change and sensitivity on the calibration batch, and the bisections that need them;
* ``controller``: sigma that follows the signals of the run;
* ``director``: puts schedule, controller and calibration together and gives each rollout its noise;
* ``deployed``: the noise of a policy outside training, for ``qerl eval`` and ``qerl rollout``.

What one draw is, is ``qerl.model.aqn``.
"""
