"""Runs an experiment of swiglu's lab under ReFrame, and reads its verdict and its figure.

    reframe -c scripts/reframe_swiglu.py -S program=/path/to/swiglu -S lab=/path/to/lab \
        -S experiment=cpu-read-ceiling -r

ReFrame submits the job by the scheduler of the site's partition; inside, the run is local.
"""

import json
import os

import reframe as rfm
import reframe.utility.sanity as sn
from reframe.core.builtins import performance_function, run_before, sanity_function, variable


@rfm.simple_test
class SwigluExperiment(rfm.RunOnlyRegressionTest):
    descr = "an experiment of swiglu: is its claim supported on this system?"
    valid_systems = ["*"]
    valid_prog_environs = ["*"]
    time_limit = "1h"

    program = variable(str, value="swiglu")
    lab = variable(str, value="lab")
    experiment = variable(str, value="cpu-read-ceiling")
    # Options of `swiglu lab run`, for example --quick, which never gives a verdict.
    more = variable(str, value="")
    # A claim that this system refutes fails the test; set it to see figures alone.
    any_verdict = variable(bool, value=False)

    @run_before("run")
    def command(self):
        self.executable = os.path.expanduser(self.program)
        lab = os.path.abspath(os.path.expanduser(self.lab))
        self.executable_opts = ["lab", "run", self.experiment, "--lab", lab, "--records", "records",
                                "--json", *self.more.split()]

    @property
    def _document(self):
        with open(os.path.join(self.stagedir, self.stdout.evaluate()), encoding="utf-8") as out:
            return json.load(out)

    @sanity_function
    def verdict(self):
        document = self._document
        state = document["verdict"]["state"]
        done = sn.assert_true(document["record"]["complete"], msg="the run is not complete")
        wanted = ("supported", "refuted", "inconclusive", "not run") if self.any_verdict else ("supported",)
        said = f"{self.experiment} is {state}: {document['verdict']['headline']}"
        return sn.all([done, sn.assert_in(state, wanted, msg=said)])

    @performance_function("x")
    def ratio(self):
        machines = self._document["verdict"]["machines"]
        return machines[0]["aggregate"]["value"] if machines and machines[0]["aggregate"] else 0.0
