"""Search: the choices of an open plan, priced by the clock, and the plan that is fastest."""
