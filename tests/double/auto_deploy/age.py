"""DOUBLE of AutoDeploy: which release it stands for; rewritten when the double is planted."""

AGE = "current"
