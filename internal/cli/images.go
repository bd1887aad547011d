package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/accessapi"
	"capstan.dev/capstan/internal/imagearchive"
)

// parallelImages is the number of machines that get an archive at the same time: one can import its part while another
// receives.
const parallelImages = 2

// imageTarget is a machine into which images can be loaded.
type imageTarget struct {
	machine string
	// load sends an archive and returns the names of its images.
	load func(ctx context.Context, archive io.Reader) ([]string, error)
}

func (a *app) loadCommand() *cobra.Command {
	var cluster, namespace string
	image := &cobra.Command{
		Use: "image ARCHIVE", Short: "Load an image archive into every machine of a cluster", Args: cobra.ExactArgs(1),
		Long: "Load an OCI or Docker image archive (the output of `docker save`) into every machine of a cluster.\n" + accessHelp,
		RunE: func(c *cobra.Command, args []string) error {
			images, err := a.loadImage(c.Context(), namespace, cluster, args[0])
			if err != nil {
				return err
			}
			if a.structured() {
				return a.print(map[string]any{"images": images})
			}
			fmt.Fprintln(a.out, strings.Join(images, "\n"))
			return nil
		},
	}
	image.Flags().StringVar(&cluster, "cluster", "", "name of the cluster")
	image.Flags().StringVarP(&namespace, "namespace", "n", "", "namespace of the cluster (default: that of the context; on this box, default)")
	a.socketFlag(image)
	_ = image.MarkFlagRequired("cluster")
	_ = image.RegisterFlagCompletionFunc("cluster", func(c *cobra.Command, _ []string, word string) ([]string, cobra.ShellCompDirective) {
		return a.completeClusters(&namespace)(c, nil, word)
	})
	return group("load", "Load images into the machines of a cluster, without a registry", image)
}

// loadImage loads an archive into the machines of a cluster, and shows the progress of each.
func (a *app) loadImage(ctx context.Context, namespace, cluster, archive string) ([]string, error) {
	if err := checkArchive(archive); err != nil {
		return nil, err
	}
	targets, err := a.imageTargets(ctx, namespace, cluster)
	if err != nil {
		return nil, err
	}
	if err := checkReads(archive, len(targets)); err != nil {
		return nil, err
	}
	slices.SortFunc(targets, func(a, b imageTarget) int { return cmp.Compare(a.machine, b.machine) })
	p := a.newProgress()
	defer p.close()
	loads := &imageLoads{archive: archive, show: p.show, steps: make([]step, len(targets))}
	for i, target := range targets {
		loads.steps[i].name = "Machine " + target.machine
	}
	p.show(slices.Clone(loads.steps))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(parallelImages)
	for i, target := range targets {
		group.Go(func() error { return loads.into(ctx, i, target) })
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	slices.Sort(loads.images)
	return slices.Compact(loads.images), nil
}

// checkArchive refuses a file that no machine takes. A named pipe can be an archive, which only the machines can look into.
func checkArchive(path string) error {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return coded{fmt.Errorf("expected an image archive, found no such file: %s", path), exitNotFound}
	case err != nil:
		return fmt.Errorf("expected an image archive: %w", err)
	case info.IsDir():
		return coded{fmt.Errorf("expected an image archive, found the folder %s", path), exitUsage}
	}
	if !info.Mode().IsRegular() {
		return nil
	}
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	start := make([]byte, imagearchive.MagicBytes)
	n, err := io.ReadFull(file, start)
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return err
	}
	return imagearchive.CheckCompression(start[:n])
}

// checkReads refuses a pipe for several machines: each would get a part of it.
func checkReads(path string, machines int) error {
	info, err := os.Stat(path)
	if err != nil || info.Mode().IsRegular() || machines < 2 {
		return err
	}
	return coded{fmt.Errorf("expected an archive in a file, found %s, which can be read once, for %d machines: save the archive to a file first", path, machines), exitUsage}
}

// imageTargets returns the machines of a cluster: on this box those that it has, and all others through the management cluster.
func (a *app) imageTargets(ctx context.Context, namespace, cluster string) ([]imageTarget, error) {
	if !a.onThisBox() {
		return a.imageTargetsOfPlane(ctx, namespace, cluster)
	}
	here, err := a.imageTargetsHere(ctx, namespace, cluster)
	if !a.joinedHosts() || err != nil && !a.onAnotherHost(err) {
		return here, err
	}
	all, err := a.imageTargetsOfPlane(ctx, namespace, cluster)
	if err != nil && len(here) > 0 {
		a.warn("The management plane does not answer, so machines on other hosts do not get the images: %v", err)
		return here, nil
	}
	return union(here, all), err
}

// union adds the machines that only the management cluster has.
func union(here, all []imageTarget) []imageTarget {
	for _, t := range all {
		if !slices.ContainsFunc(here, func(h imageTarget) bool { return h.machine == t.machine }) {
			here = append(here, t)
		}
	}
	return here
}

// imageLoads are the loads of one archive into several machines.
type imageLoads struct {
	archive string
	show    func([]step)

	mu     sync.Mutex
	steps  []step
	images []string
}

func (l *imageLoads) into(ctx context.Context, i int, target imageTarget) error {
	file, err := os.Open(l.archive)
	if err != nil {
		return err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return err
	}
	counted := &countedReader{from: file, total: info.Size(), changed: func(percent int64) {
		l.update(i, step{note: fmt.Sprintf("%d %% of %d MiB", percent, info.Size()>>20)}, nil)
	}}
	images, err := target.load(ctx, counted)
	if err != nil {
		return fmt.Errorf("cannot load %s into machine %s: %w", l.archive, target.machine, err)
	}
	l.update(i, step{done: true}, images)
	return nil
}

func (l *imageLoads) update(i int, s step, images []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s.name = l.steps[i].name
	l.steps[i] = s
	l.images = append(l.images, images...)
	l.show(slices.Clone(l.steps))
}

// countedReader reports how much was read, in steps of one percent.
type countedReader struct {
	from             io.Reader
	total, read, was int64
	changed          func(percent int64)
}

// Read implements io.Reader.
func (c *countedReader) Read(p []byte) (int, error) {
	n, err := c.from.Read(p)
	c.read += int64(n)
	if percent := 100 * c.read / max(c.total, c.read, 1); percent != c.was {
		c.was = percent
		c.changed(percent)
	}
	return n, err
}

// imageTargetsOfPlane returns the machines of a cluster, which the management cluster reaches.
func (a *app) imageTargetsOfPlane(ctx context.Context, namespace, cluster string) ([]imageTarget, error) {
	m, key, err := a.clusterOf(namespace, cluster)
	if err != nil {
		return nil, err
	}
	list := &infrav1.CapstanMachineList{}
	if err := m.client.List(ctx, list, client.InNamespace(key.Namespace), client.MatchingLabels{clusterv1.ClusterNameLabel: cluster}); err != nil {
		return nil, err
	}
	var targets []imageTarget
	for i := range list.Items {
		name := list.Items[i].Name
		targets = append(targets, imageTarget{name, func(ctx context.Context, archive io.Reader) ([]string, error) {
			return a.uploadImage(ctx, key.Namespace, name, archive)
		}})
	}
	if len(targets) == 0 {
		return nil, coded{fmt.Errorf("expected machines of cluster %s (namespace %s), found none", cluster, key.Namespace), exitNotFound}
	}
	return targets, nil
}

// uploadImage sends an archive to the management cluster.
func (a *app) uploadImage(ctx context.Context, namespace, machine string, archive io.Reader) ([]string, error) {
	request, _, err := a.accessRequest("POST", namespace, machine, accessapi.Images, nil)
	if err != nil {
		return nil, err
	}
	result := request.Body(archive).Do(ctx)
	if err := result.Error(); err != nil {
		return nil, accessError(err)
	}
	data, err := result.Raw()
	if err != nil {
		return nil, err
	}
	var loaded accessapi.LoadedImages
	if err := json.Unmarshal(data, &loaded); err != nil {
		return nil, errors.Join(errors.New("expected the names of images from the management cluster"), err)
	}
	return loaded.Images, nil
}
