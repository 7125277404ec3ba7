"""Fast paths of the energies' forces. Each is compared with ``energylab.energies``, output and every gradient."""
