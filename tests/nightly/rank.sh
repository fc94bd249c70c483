# sh rank.sh COMMAND...: run it as one of two ranks; the last one gets the flags in OF_LAST_RANK.
if [ "$RANK" = 1 ]; then
  # shellcheck disable=SC2086  # several words
  exec "$@" $OF_LAST_RANK
fi
exec "$@"
