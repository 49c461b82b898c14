#!/bin/bash
# Stands for podman: runs the program of a container as a process of its own session, which lives on
# when this command is killed, until `rm`; its state is in $CONTAINERS_CONF.
place=$CONTAINERS_CONF; verb=$1; shift
if [ "$verb" = rm ]; then
  name=${!#}
  echo "rm $*" >> "$place/log"
  [ -e "$place/$name" ] || { echo "Error: no such container $name" >&2; exit 1; }
  kill -9 -- "-$(cat "$place/$name")" 2> /dev/null
  rm "$place/$name"
  exit 0
fi
echo "run $*" >> "$place/log"
name=; entrypoint=
while [[ $1 == -* ]]; do
  case $1 in
    --name=*) name=${1#--name=} ;;
    --entrypoint=*) entrypoint=${1#--entrypoint=} ;;
  esac
  shift
done
[ "$1" = missing ] && { echo "Error: missing: image not known" >&2; exit 125; }
shift
HOME=$place setsid bash -c 'echo $$ > "$1"; shift; exec "$@"' - "$place/$name" "$entrypoint" "$@" <&0 &
wait $!
