"""Advantages: functions of a group's rewards, computed in float64."""
