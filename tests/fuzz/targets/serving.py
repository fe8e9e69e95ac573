TARGETS: tuple = ()
