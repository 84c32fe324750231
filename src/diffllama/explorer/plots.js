// Draws the Plotly figures in `props.value`, JSON with `figures` and `file`. A click on a cell triggers `click`.
// Its buttons download a figure as PNG, and its numbers as JSON.
const draw = () => {
  const row = element.querySelector(".plots");
  const { figures, file } = props.value ? JSON.parse(props.value) : { figures: [] };
  row.replaceChildren(...figures.map(() => document.createElement("div")));  // all, so that they have their widths
  figures.forEach(({ data, layout }, number) => {
    const plot = row.children[number];
    const name = figures.length > 1 ? `${file}_${number + 1}` : file;
    const numbers = {
      name: "Download the numbers as JSON",
      icon: Plotly.Icons.disk,
      click: (drawn) => {
        const traces = drawn._fullData.map(({ name, x, y, z }) => ({
          name, x: x && Array.from(x), y: y && Array.from(y), z: z && Array.from(z, (line) => Array.from(line)),
        }));
        const link = document.createElement("a");
        link.href = URL.createObjectURL(new Blob([JSON.stringify(traces)], { type: "application/json" }));
        link.download = `${name}.json`;
        link.click();
        URL.revokeObjectURL(link.href);
      },
    };
    Plotly.newPlot(plot, data, layout, {
      responsive: true,
      displaylogo: false,
      plotlyServerURL: "",  // nothing is uploaded
      displayModeBar: true,
      modeBarButtonsToRemove: ["sendChartToCloud", "sendDataToCloud", "select2d", "lasso2d", "autoScale2d"],
      modeBarButtonsToAdd: [numbers],
      toImageButtonOptions: { format: "png", filename: name, scale: 2 },
    });
    plot.on("plotly_click", ({ points }) => trigger("click", { x: points[0].x, y: points[0].y }));
  });
};
const whenLoaded = () => (window.Plotly ? draw() : setTimeout(whenLoaded, 50));
watch("value", whenLoaded);
whenLoaded();
