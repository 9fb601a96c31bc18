"""Files of settings in the forms of other systems, read as settings of this one."""
