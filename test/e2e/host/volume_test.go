//go:build e2e

package host_test

import (
	"os"
	"path/filepath"
	"testing"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
	"capstan.dev/capstan/internal/testenv/expect"
)

// A volume outlives its machine, a capstand that is killed, and a machine that starts again. The successor has its files. The machines
// cannot write more than its size, and its deletion removes its file.
func TestVolume(t *testing.T) {
	leavesNothing(t)
	c := newCapstand(t)
	volume := &hostpb.Volume{Id: "e2e-volume", Namespace: "default", Name: "data", SizeBytes: 32 << 20}
	_, err := c.EnsureVolume(c.ctx(), volume)
	expect.NoError(t, err)
	image := filepath.Join(c.root, "volumes", volume.Id, "disk.img")
	with := func(n int) *hostpb.MachineSpec {
		spec := blue.machine(n)
		spec.Volumes = []*hostpb.VolumeMount{{Id: volume.Id, Path: "/srv/data"}}
		return spec
	}
	remove := func() error {
		_, err := c.DeleteVolume(c.ctx(), &hostpb.DeleteVolumeRequest{Id: volume.Id, Namespace: volume.Namespace, Name: volume.Name})
		return err
	}

	first := with(10)
	c.make(first)
	inside(t, blue.address(10), "echo precious >/srv/data/file; sync")
	if out := inside(t, blue.address(10), "dd if=/dev/zero of=/srv/data/big bs=1M count=64 2>/dev/null || echo full; rm /srv/data/big"); out != "full" {
		t.Errorf("the machine wrote more than the size of its volume: %q", out)
	}
	c.kill()
	c.start()
	_, err = c.EnsureMachine(c.ctx(), &hostpb.EnsureMachineRequest{Spec: with(11), BootstrapData: []byte("#cloud-config\n")})
	if got := refusal.Of(err).Reason; got != hostpb.Refusal_VOLUME_IN_USE {
		t.Errorf("a second machine with the volume: %v", err)
	}
	if got := refusal.Of(remove()).Reason; got != hostpb.Refusal_VOLUME_IN_USE {
		t.Errorf("the deletion of a volume in use: %s", got)
	}
	c.deleteMachine(first)
	c.kill()
	c.start()

	second := with(11)
	c.make(second)
	if got := inside(t, blue.address(11), "cat /srv/data/file"); got != "precious" {
		t.Errorf("the successor reads %q", got)
	}
	c.deleteMachine(second)
	if _, err := os.Stat(image); err != nil {
		t.Errorf("the volume went with its machine: %v", err)
	}
	expect.NoError(t, remove())
	if _, err := os.Stat(image); !os.IsNotExist(err) {
		t.Errorf("the file of the deleted volume: %v", err)
	}
}
