package host

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/host/cgroup"
	"capstan.dev/capstan/internal/host/devices"
	"capstan.dev/capstan/internal/host/events"
	"capstan.dev/capstan/internal/host/fencing"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/machineimage"
	"capstan.dev/capstan/internal/host/network"
	"capstan.dev/capstan/internal/host/proc"
	"capstan.dev/capstan/internal/host/runc"
)

// platform contains the parts that machines, networks and load balancers share: the configuration, the properties of the Linux
// host, the state folder, the tools, and the lock of the three registries.
type platform struct {
	config      Config
	log         *slog.Logger
	id          string
	boxID       string
	capacity    int64
	diskBackend string // diskImage or diskNone
	// localVolumeSizes is sizesEnforced or sizesNotEnforced.
	localVolumeSizes string
	capabilities     []string
	images           *machineimage.Store // nil in some tests
	cdi              *devices.CDI        // nil in some tests
	store            store
	runc             runc.Runc
	box              network.Box
	broadcaster      *events.Broadcaster
	contacts         *contacts
	fence            *fencing.Fence // nil in some tests
	startSeconds     prometheus.Histogram
	sysctlErrors     lastErrors
	// findHostFiles looks for the mounts and device nodes of a machine. It can hang: neither mu nor the lock of a machine is held.
	findHostFiles func(*hostpb.MachineSpec) error
	looks         looks
	// imageFolders and backupFolders are the looks at these folders. A hung file system of one kind must not use up the looks of another.
	imageFolders, backupFolders looks

	// running counts the goroutines of machines, load balancers, the firewall and the trash.
	running sync.WaitGroup
	// trash is held while the trash is emptied.
	trash sync.Mutex
	ctx   context.Context

	// mu guards the maps of networks, machines and load balancers. It is held while a request is admitted and recorded,
	// never while a machine starts or ends.
	mu sync.Mutex
}

// cgroup of a part of this host.
func (p *platform) cgroup(name string) cgroup.Group {
	return cgroup.Group("/capstan/" + p.id + "/" + name)
}

// forgetOtherBoot removes the state of runc and the folders that machines share with capstand after a reboot of the host. The process
// ids of runc are invalid then, and other processes may have them. The terms of endpoints are times of a clock that starts with the boot.
// No process of a balancer runs.
func (p *platform) forgetOtherBoot() error {
	path := p.store.path("boot-id")
	previous, _ := os.ReadFile(path)
	current := proc.BootID()
	if string(previous) == current {
		return nil
	}
	if err := errors.Join(os.RemoveAll(p.runc.Root), p.store.removeRunDirs(), p.store.removeStartMarks()); err != nil {
		return err
	}
	// capstand must start on a full disk, to empty the trash. The content after a crash of the host does not matter, because no other boot
	// has it.
	return atomicfile.Overwrite(path, []byte(current), 0o644)
}

// emptyTrash removes discarded folders in the background, until capstand ends: the orderly stop of machines at a shutdown waits for this.
// The next capstand continues.
func (p *platform) emptyTrash() {
	p.running.Go(func() {
		p.trash.Lock()
		defer p.trash.Unlock()
		if err := p.store.emptyTrash(p.ctx); err != nil && p.ctx.Err() == nil {
			p.log.Error("Discarded folders were not removed completely", "error", err)
		}
	})
}

// lease reserves the addresses of a machine that is about to be recorded.
func (p *platform) lease(spec *hostpb.MachineSpec) error {
	return p.box.Lease(spec.Network.Id, spec.Id, spec.Namespace+"/"+spec.Name, leased(spec))
}

// renewLease reserves the addresses of a recorded machine again, for example after a reboot.
func (p *platform) renewLease(spec *hostpb.MachineSpec) error {
	return p.box.Renew(spec.Network.Id, spec.Id, spec.Namespace+"/"+spec.Name, leased(spec))
}

func leased(spec *hostpb.MachineSpec) (all []string) {
	for _, a := range spec.Addresses {
		all = append(all, a.Address)
	}
	return all
}
